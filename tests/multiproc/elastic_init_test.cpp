// Workers of an elastic job form the world of each of its epochs. The test plays the supervisor: it serves the job's
// store and writes memberships.
#include "child.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/membership.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace cohort::test {
namespace {

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

class Job {
 public:
  Job()
      : secret_(value_or_throw(net::Secret::generate())),
        memory_(value_or_throw(secret_.to_sealed_memfd())),
        server_({.secret = secret_}),
        store_(store::connect_tcp_store("127.0.0.1", server_.endpoint().tcp.port, secret_,
                                        net::deadline_in(std::chrono::seconds(30)))) {
    EXPECT_EQ(::fcntl(memory_.get(), F_SETFD, 0), 0);
  }

  void begin(std::uint64_t epoch, const std::vector<int>& workers, const std::string& cause = "") {
    rendezvous::Membership membership{epoch, {}, cause};
    for (const int worker : workers) membership.members.push_back({worker, "here", 0});
    store_->set(rendezvous::membership_key(epoch), encode(membership));
    store_->set(store::kEpochKey, std::to_string(epoch));
  }

  /// Until a rank has come to the meeting of an epoch.
  void await_rank(int epoch, int rank) {
    (void)store_->get(fmt::format("init/world#{}.1/card/{}", epoch, rank), net::deadline_in(std::chrono::seconds(60)));
  }

  Child start(int worker, std::map<std::string, std::string> environment = {}) {
    // The rank and size that the process was started with do not matter.
    environment.insert({{"RANK", "0"},
                        {"WORLD_SIZE", "1"},
                        {"COHORT_WORKER", std::to_string(worker)},
                        {"COHORT_STORE", net::to_string(server_.endpoint())},
                        {"COHORT_SECRET_FD", std::to_string(memory_.get())}});
    return Child({{COHORT_INIT_WORKER, "times=9", "beat=1"}, std::move(environment), {}});
  }

 private:
  const net::Secret secret_;
  sys::UniqueFd memory_;
  store::StoreServer server_;
  std::shared_ptr<store::MeetingStore> store_;
};

void expect_formed(Child& child, int rank, int size) {
  EXPECT_TRUE(child.wait_for_output(fmt::format("formed rank={} size={} ", rank, size))) << child.output();
}

// On one host and on two, which this machine pretends to be.
class ElasticInit : public ::testing::TestWithParam<const char*> {
 protected:
  Child start(int worker) {
    return job_.start(worker, *GetParam() == '\0'
                                  ? std::map<std::string, std::string>{}
                                  : std::map<std::string, std::string>{{"COHORT_PRETEND_HOSTS", GetParam()}});
  }
  Job job_;
};

TEST_P(ElasticInit, SurvivorsFormTheNextWorldWithNewcomers) {
  job_.begin(0, {0, 1, 2});
  Child first = start(0), second = start(1), third = start(2);
  expect_formed(first, 0, 3);
  expect_formed(second, 1, 3);
  expect_formed(third, 2, 3);
  second.kill(SIGKILL);
  EXPECT_TRUE(first.wait_for_output("ended by PeerLost")) << first.output();
  job_.begin(1, {0, 2}, "rank 1 was killed by signal 9");
  expect_formed(first, 0, 2);
  expect_formed(third, 1, 2);
  // One goes and two come.
  third.kill(SIGKILL);
  job_.begin(2, {0, 3, 4});
  Child newcomer = start(3), another = start(4);
  expect_formed(newcomer, 1, 3);
  expect_formed(another, 2, 3);
  newcomer.kill(SIGKILL);
  another.kill(SIGKILL);
  job_.begin(3, {0});
  expect_formed(first, 0, 1);
}

TEST_P(ElasticInit, WhoDiesWhileAWorldIsFormedHoldsNobody) {
  job_.begin(0, {0, 1, 2, 3});
  // Worker 3 never comes, worker 2 dies while all wait for it.
  Child first = start(0), second = start(1), third = start(2);
  for (int rank = 0; rank < 3; ++rank) job_.await_rank(0, rank);
  third.kill(SIGKILL);
  job_.begin(1, {0, 1, 4});
  for (int rank = 0; rank < 2; ++rank) job_.await_rank(1, rank);
  job_.begin(2, {0, 1});
  expect_formed(first, 0, 2);
  expect_formed(second, 1, 2);
}

TEST_P(ElasticInit, EpochsThatBeginWhileAWorldIsFormed) {
  job_.begin(0, {0, 1, 2});
  Child first = start(0), second = start(1), third = start(2);
  for (std::uint64_t epoch = 1; epoch <= 200; ++epoch) {
    job_.begin(epoch, epoch % 2 == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{0, 2, 1});
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Whichever they formed, they formed the same.
  third.kill(SIGKILL);
  job_.begin(201, {1, 0});
  expect_formed(first, 1, 2);
  expect_formed(second, 0, 2);
}

TEST_P(ElasticInit, WhoWasRemovedIsTold) {
  job_.begin(0, {0, 1});
  job_.begin(1, {0}, "host b was drained");
  Child removed = start(1);
  Child left = start(0);
  expect_formed(left, 0, 1);
  EXPECT_EQ(removed.wait(), 3);
  EXPECT_CONTAINS(removed.output(), "Aborted: ");
  EXPECT_CONTAINS(removed.output(), "worker 1 on ");
  EXPECT_CONTAINS(removed.output(), "epoch 1 goes on with 1 other: host b was drained");
}

// The others are lost before they have formed a world without it.
TEST_P(ElasticInit, WhoWasRemovedIsAMemberAgainWhereItIsNeeded) {
  job_.begin(0, {0, 1});
  job_.begin(1, {0}, "host b was drained");
  Child removed = start(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  job_.begin(2, {1}, "worker 0 was killed");
  expect_formed(removed, 0, 1);
}

// A process may be started, and import what it needs, before the others learn of it.
TEST_P(ElasticInit, WhoIsNoMemberYetWaitsForAnEpochWithIt) {
  job_.begin(0, {0});
  Child newcomer = start(2);
  Child first = start(0);
  expect_formed(first, 0, 1);
  job_.begin(1, {0});
  job_.begin(2, {2});
  expect_formed(newcomer, 0, 1);
}

INSTANTIATE_TEST_SUITE_P(OnHosts, ElasticInit, ::testing::Values("", "2"),
                         [](const auto& one) { return *one.param == '\0' ? "One" : "Two"; });

TEST(ElasticJobs, ThatAreNoneAreRefused) {
  Job job;
  Child child = job.start(0);
  EXPECT_EQ(child.wait(), 3);
  EXPECT_CONTAINS(child.output(), "has no membership of epoch 0");
  Child without = job.start(0, {{"COHORT_WORKER", "none"}});
  EXPECT_EQ(without.wait(), 3);
  EXPECT_CONTAINS(without.output(), "COHORT_WORKER");
}

}  // namespace
}  // namespace cohort::test
