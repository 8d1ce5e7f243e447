// Who gets a copy of a server's rows, and dies or is stopped in the midst of it: workers do not wait for it.
#include "net/rpc.h"
#include "ps/command_record.h"
#include "ps/membership.h"
#include "ps/place.h"
#include "ps/replication.h"
#include "ps/testing.h"
#include "store/served_store.h"
#include "sys/unique_fd.h"

#include <cohort/ps.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::ps {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr char kEnd = 7;  // of an image's last piece

net::Deadline soon() { return net::deadline_in(seconds(10)); }

/// A job of two servers, of which the second is not what it says.
class Job {
 public:
  Job() {
    secret_ = value_or_throw(net::Secret::generate());
    store_ = std::make_unique<store::StoreServer>(store::StoreServerOptions{.secret = secret_});
    inherited_ = value_or_throw(secret_->to_sealed_memfd());
    ::setenv("COHORT_STORE", net::to_string(store_->endpoint()).c_str(), 1);
    ::setenv("COHORT_SECRET_FD", std::to_string(inherited_.get()).c_str(), 1);
    const std::string name = "@cohort-copy-" + std::to_string(::getpid());
    ServerOptions options;
    options.endpoint = name;
    options.replicas = 1;
    options.number = 0;
    options.servers = 2;
    server_ = std::make_unique<Server>(options);
    Membership::Options as;
    as.number = 1;
    as.servers = 2;
    as.replicas = 1;
    as.endpoint = name + "-nobody";
    membership_ = std::make_unique<Membership>(as);
    ClientOptions client;
    client.servers = {name};
    client.timeout = seconds(20);
    client_.emplace(Client::connect(client));
  }
  ~Job() {
    client_.reset();
    server_.reset();
    ::unsetenv("COHORT_STORE");
    ::unsetenv("COHORT_SECRET_FD");
  }
  Client& client() { return *client_; }

  /// Begins to get a copy, by the calls of a Follower.
  std::unique_ptr<net::RpcClient> follow(std::uint64_t copy) {
    std::unique_ptr<net::RpcClient> rpc;
    net::rpc_connect(value_or_throw(place_of(server_->endpoint(), "")), soon(),
                     [&](net::SecureConnection connection, const std::string& at, net::Deadline) {
                       rpc = std::make_unique<net::RpcClient>(std::move(connection), "parameter", at);
                     });
    const auto life = membership_->self().life;
    const std::string said =
        rpc->call(static_cast<std::uint8_t>(Method::Follow), pack(Follow{0, 1, life, copy}), soon());
    EXPECT_FALSE(value_or_throw(unpack<Answer>(said)).record.error);
    received_ = 0;
    return rpc;
  }
  /// How many records it gets; whether the image ends with them.
  struct Got {
    std::size_t records = 0;
    bool whole = false;
  };
  Got fetch(net::RpcClient& rpc, std::uint64_t copy) {
    constexpr std::uint64_t kOne = 1;  // bytes: one record
    const std::string answer =
        rpc.call(static_cast<std::uint8_t>(Method::Fetch),
                 pack(Fetch{0, membership_->self().life, copy, received_, std::uint64_t{1} << 34, kOne}), soon());
    const auto opened = value_or_throw(unpack<Answer>(answer));
    if (opened.record.error) throw *opened.record.error;
    const auto fetched = value_or_throw(unpack<Fetched>(opened.payload));
    Got got;
    for (std::string_view rest = fetched.payload; const auto command = next_record(rest); ++got.records)
      got.whole = command->method == Method::Piece && command->body.front() == kEnd;
    EXPECT_EQ(got.records, fetched.record.count);
    received_ += got.records;
    return got;
  }

 private:
  std::optional<net::Secret> secret_;
  std::unique_ptr<store::StoreServer> store_;
  sys::UniqueFd inherited_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Membership> membership_;
  std::optional<Client> client_;
  std::uint64_t received_ = 0;
};

enum class How { Dies, IsSilent };

/// Has the image, and not all commands behind it: from then on answers wait for it.
void stop_near(How how) {
  Job job;
  Table table = job.client().table("t", testing::counters(Consistency::async()));
  const std::vector<std::uint64_t> keys{1};
  const std::vector<float> ones{-1};
  table.push(keys, ones).wait();
  auto rpc = job.follow(1);
  while (!job.fetch(*rpc, 1).whole) {
  }
  table.push(keys, ones).wait();
  ASSERT_EQ(job.fetch(*rpc, 1).records, 1U);
  const auto begun = steady_clock::now();
  Work late = table.push(keys, ones);
  if (how == How::Dies) rpc.reset();
  late.wait();
  EXPECT_LT(steady_clock::now() - begun, how == How::Dies ? seconds(2) : kSilence + seconds(2));
  float row = 0;
  table.pull(keys, std::span(&row, 1)).wait();
  EXPECT_EQ(row, 3);
}

TEST(Copies, WhoDiesOnceAnswersWaitForItHoldsNobodyUp) { stop_near(How::Dies); }
TEST(Copies, WhoIsSilentOnceAnswersWaitForItHoldsNobodyUp) { stop_near(How::IsSilent); }

TEST(Copies, WhoIsSilentWhileItGetsTheImageIsGivenUp) {
  Job job;
  Table table = job.client().table("t", testing::counters(Consistency::async()));
  const auto rpc = job.follow(1);
  ASSERT_EQ(job.fetch(*rpc, 1).records, 1U);
  std::this_thread::sleep_for(kSilence + seconds(1));
  EXPECT_THROW(job.fetch(*rpc, 1), Error);
}

}  // namespace
}  // namespace cohort::ps
