// Tasks of Slurm on several nodes where it has set up no PMI: they meet through MUNGE, by a daemon of the test's own.
#include "child.h"
#include "net/socket.h"
#include "rendezvous/detect.h"
#include "rendezvous/exchange.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

using Environment = std::map<std::string, std::string>;

constexpr const char* kMunged = "/usr/sbin/munged";

class ThroughMunge : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kMunged)) GTEST_SKIP() << kMunged << " is not installed";
    std::string pattern = "/tmp/cohort-munge-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    ::chmod(folder_.c_str(), 0755);
    std::ofstream(file("key"), std::ios::binary) << std::string(64, 'k') << ::getpid();
    ::chmod(file("key").c_str(), 0600);
    std::ofstream(file("slurm.conf")) << "AuthType=auth/munge\nAuthInfo=socket=" << file("socket") << "\n";
    daemon_.emplace(
        ChildOptions{{kMunged, "--foreground", "--force", "--key-file=" + file("key"), "--socket=" + file("socket"),
                      "--pid-file=" + file("pid"), "--seed-file=" + file("seed"), "--log-file=" + file("log")},
                     {},
                     {}});
    for (int i = 0; i < 600 && !std::filesystem::exists(file("socket")); ++i) ::usleep(50000);
    if (!std::filesystem::exists(file("socket"))) GTEST_SKIP() << "munged does not start here: " << daemon_->output();
  }
  void TearDown() override {
    daemon_.reset();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  std::string file(const std::string& name) const { return folder_ + "/" + name; }

  // As srun sets them for a step with a task on each of its nodes, the first of which is this host.
  Environment variables(int rank, int size, const std::string& step) const {
    std::string hosts = "localhost";
    for (int i = 1; i < size; ++i) hosts += fmt::format(",n{}", i);
    return {{"SLURM_CONF", file("slurm.conf")},
            {"SLURM_JOB_ID", std::to_string(::getpid())},
            {"SLURM_STEP_ID", step},
            {"SLURM_PROCID", std::to_string(rank)},
            {"SLURM_LOCALID", "0"},
            {"SLURM_NODEID", std::to_string(rank)},
            {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
            {"SLURM_STEP_NUM_NODES", std::to_string(size)},
            {"SLURM_STEP_TASKS_PER_NODE", fmt::format("1(x{})", size)},
            {"SLURM_STEP_NODELIST", hosts}};
  }

  Child task(int rank, int size, const std::string& step, const std::vector<std::string>& words = {},
             std::optional<uid_t> user = {}) const {
    std::vector<std::string> command = {COHORT_INIT_WORKER};
    command.insert(command.end(), words.begin(), words.end());
    return Child({std::move(command), variables(rank, size, step), user});
  }

  std::string folder_;
  std::optional<Child> daemon_;
};

TEST_F(ThroughMunge, TasksOfTwoStepsMeetTheirOwn) {
  std::vector<Child> tasks;
  for (int rank = 2; rank >= 0; --rank) {  // rank 0 comes last
    for (const char* step : {"0", "1"}) tasks.push_back(task(rank, 3, step, {"times=2"}));
  }
  for (Child& one : tasks) {
    EXPECT_EQ(one.wait(), 0) << one.output();
    EXPECT_NE(one.output().find("size=3"), std::string::npos) << one.output();
  }
}

TEST_F(ThroughMunge, RankZeroMayBeOnAnyHostWhereTheUserHasArranged) {
  // srun -m arbitrary, with a list of hosts that begins with another.
  std::vector<Child> tasks;
  for (int rank = 1; rank >= 0; --rank) {
    Environment environment = variables(rank, 2, "9");
    environment["SLURM_STEP_NODELIST"] = "n1.invalid,localhost";
    environment["SLURM_NODEID"] = std::to_string(1 - rank);
    environment["SLURM_DISTRIBUTION"] = "arbitrary";
    tasks.push_back(Child({{COHORT_INIT_WORKER}, environment, {}}));
  }
  for (Child& one : tasks) EXPECT_EQ(one.wait(), 0) << one.output();
}

TEST_F(ThroughMunge, ATaskThatStaysAwayIsNamed) {
  Child first = task(0, 3, "2", {"init_timeout_ms=4000"});
  Child second = task(1, 3, "2", {"init_timeout_ms=4000"});
  EXPECT_EQ(first.wait(), 3) << first.output();
  EXPECT_NE(first.output().find("1 of 3 ranks did not come in time: 2"), std::string::npos) << first.output();
  EXPECT_EQ(second.wait(), 3) << second.output();
}

TEST_F(ThroughMunge, RankZeroThatStaysAwayIsNamed) {
  Child second = task(1, 2, "3", {"init_timeout_ms=2000"});
  EXPECT_EQ(second.wait(), 3) << second.output();
  EXPECT_NE(second.output().find("rank 0 did not answer at localhost"), std::string::npos) << second.output();
}

TEST_F(ThroughMunge, AnotherUserIsNotTold) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to become another user";
  constexpr uid_t kNobody = 65534;
  Child first = task(0, 2, "4", {"init_timeout_ms=5000"});
  Child other = task(1, 2, "4", {"init_timeout_ms=3000"}, kNobody);
  const int status = other.wait();
  if (status == 126 || status == 127) GTEST_SKIP() << "the worker's program cannot be run by another user here";
  EXPECT_EQ(status, 3) << other.output();
  EXPECT_EQ(first.wait(), 3) << first.output();
  EXPECT_NE(first.output().find("1 of 2 ranks did not come in time: 1"), std::string::npos) << first.output();
}

TEST_F(ThroughMunge, PortsOfOthersCostTimeAndNoMore) {
  // Two of the job's ports belong to somebody who takes connections and says nothing.
  const Environment own = variables(0, 3, "6");
  const auto said = rendezvous::detect(rendezvous::Environment(own.begin(), own.end()));
  ASSERT_TRUE(said) << said.error().what();
  const auto ports = rendezvous::munge_ports(said->job);
  std::vector<sys::UniqueFd> strangers;
  for (std::size_t i = 0; i < 2; ++i) {
    auto stranger = net::listen_on({{"127.0.0.1", ports[i]}, {}});
    if (stranger) strangers.push_back(*std::move(stranger));  // else somebody is there already
  }
  std::vector<Child> tasks;
  for (int rank = 0; rank < 3; ++rank) tasks.push_back(task(rank, 3, "6"));
  for (Child& one : tasks) EXPECT_EQ(one.wait(), 0) << one.output();
}

TEST_F(ThroughMunge, ThoseWhoSayNothingHoldUpNobody) {
  const Environment own = variables(0, 3, "7");
  const auto said = rendezvous::detect(rendezvous::Environment(own.begin(), own.end()));
  ASSERT_TRUE(said) << said.error().what();
  Child first = task(0, 3, "7", {"init_timeout_ms=60000"});
  std::vector<sys::UniqueFd> crowd;
  const auto limit = net::deadline_in(std::chrono::seconds(30));
  while (crowd.size() < 200 && !net::passed(limit)) {
    for (const std::uint16_t port : rendezvous::munge_ports(said->job)) {
      auto socket = net::connect_once({{"127.0.0.1", port}, {}}, limit);
      if (!socket) continue;
      // Some of them begin to say something.
      if (crowd.size() % 2 == 0) static_cast<void>(!::send(socket->get(), "\0\0", 2, MSG_NOSIGNAL));
      crowd.push_back(*std::move(socket));
      break;
    }
  }
  ASSERT_EQ(crowd.size(), 200U);
  Child second = task(1, 3, "7", {"init_timeout_ms=30000"});
  Child third = task(2, 3, "7", {"init_timeout_ms=30000"});
  for (Child* const one : {&first, &second, &third}) EXPECT_EQ(one->wait(), 0) << one->output();
}

TEST_F(ThroughMunge, WithoutTheDaemonTheAdviceIsOther) {
  daemon_.reset();
  std::filesystem::remove(file("socket"));
  Child first = task(0, 2, "5");
  EXPECT_EQ(first.wait(), 3) << first.output();
  EXPECT_NE(first.output().find("srun --mpi=pmi2"), std::string::npos) << first.output();
  EXPECT_NE(first.output().find("munged"), std::string::npos) << first.output();
}

}  // namespace
}  // namespace cohort::test
