// How a job ends from outside, and that nothing of it is left: signals, terminals, readers that go, and the death of
// any of the processes that make it up. Ranks here start grandchildren that leave their session.
#include "launch_harness.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

namespace cohort::test {
namespace {

/// Every rank leaves a grandchild in its own session, and one that ignores SIGTERM and SIGINT too.
constexpr const char* kFamily =
    "setsid sleep 1001 & sh -c 'trap \"\" TERM INT HUP; setsid sleep 1002 & wait' & "
    "touch ready.$RANK; exec sleep 1000";

class Family : public testing::Test {
 protected:
  void start() {
    JobOptions job;
    job.arguments = {"run", "-np", "2", "--grace", "0.5"};
    job.arguments.insert(job.arguments.end(), {"sh", "-c", kFamily});
    job_ = std::make_unique<Job>(job);
    ASSERT_TRUE(eventually([this] { return job_->processes("sleep 100").size() == 6; })) << job_->err();
  }
  /// The promise is 2 s; a loaded machine gets some more.
  void expect_nothing_left() {
    const auto since = std::chrono::steady_clock::now();
    EXPECT_TRUE(eventually(
        [this] {
          job_->running();
          return job_->processes().empty();
        },
        10s))
        << "processes are left";
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    RecordProperty("seconds", fmt::format("{:.3f}", seconds));
    EXPECT_LT(seconds, 4);
    EXPECT_TRUE(std::filesystem::is_empty(job_->folder() + "/tmp"));
  }
  std::unique_ptr<Job> job_;
};

TEST_F(Family, KilledRank) {
  start();
  ::kill(job_->processes("sleep 1000").front(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 137);
}

TEST_F(Family, KilledSupervisor) {
  start();
  job_->signal(SIGKILL);
  expect_nothing_left();
}

TEST_F(Family, KilledAgent) {
  start();
  ::kill(job_->agent(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 1);
  EXPECT_NE(job_->err().find("the agent of"), std::string::npos) << job_->err();
}

TEST_F(Family, KilledGuard) {
  start();
  ::kill(job_->guard(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 1);
  EXPECT_NE(job_->err().find("the guard of"), std::string::npos) << job_->err();
}

TEST_F(Family, KilledSupervisorAndAgentAndRanks) {
  start();
  const pid_t agent = job_->agent();
  for (const pid_t pid : job_->processes("sleep 1000")) ::kill(pid, SIGKILL);
  ::kill(agent, SIGKILL);
  job_->signal(SIGKILL);
  expect_nothing_left();
}

TEST_F(Family, KilledAgentAndGuard) {
  start();
  const pid_t guard = job_->guard();
  const pid_t agent = job_->agent();
  ::kill(guard, SIGKILL);
  ::kill(agent, SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 1) << job_->err();
}

TEST_F(Family, StoppedAgentDoesNotOutliveTheSupervisor) {
  start();
  ::kill(job_->agent(), SIGSTOP);
  job_->signal(SIGKILL);
  expect_nothing_left();
}

TEST_F(Family, EndOfAllRanks) {
  start();
  for (const pid_t pid : job_->processes("sleep 1000")) ::kill(pid, SIGTERM);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 143);
}

TEST(LaunchSignals, GrandchildrenOfAGoodEndAreEndedToo) {
  const auto finished = run({{"run", "-np", "2", "sh", "-c", "setsid sleep 1000 & exit 0"}});
  EXPECT_EQ(finished.status, 0) << finished.err;
}

class LaunchSignal : public testing::TestWithParam<int> {};
TEST_P(LaunchSignal, ReachesTheRanksAndGivesTheStatus) {
  Job job({{"run", "-np", "2", "sh", "-c",
            "trap 'echo saved $RANK; exit 0' INT TERM HUP QUIT; echo ready; while :; do sleep 0.05; done"}});
  ASSERT_TRUE(eventually([&] { return lines_of(job.out()).size() == 2; })) << job.err();
  job.signal(GetParam());
  EXPECT_EQ(job.wait(), 128 + GetParam()) << job.err();
  EXPECT_NE(job.out().find("saved 0"), std::string::npos) << job.out();
  EXPECT_NE(job.out().find("saved 1"), std::string::npos) << job.out();
  EXPECT_TRUE(job.processes().empty());
  const auto runs = run({{"runs", "--json", "--folder", job.folder() + "/runs"}});
  EXPECT_NE(runs.out.find("\"stopped\""), std::string::npos) << "it has not failed: " << runs.out << runs.err;
}
INSTANTIATE_TEST_SUITE_P(All, LaunchSignal, testing::Values(SIGINT, SIGTERM, SIGHUP));

TEST(LaunchSignals, UserSignalsAreForwarded) {
  Job job({{"run", "-np", "2", "sh", "-c", "trap 'echo usr1; exit 0' USR1; echo ready; while :; do sleep 0.05; done"}});
  ASSERT_TRUE(eventually([&] { return lines_of(job.out()).size() == 2; })) << job.err();
  job.signal(SIGUSR1);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(lines_of(job.out()).size(), 4U) << job.out();
}

TEST(LaunchSignals, AFailureIsToldWhileOthersTakeTheirTime) {
  Job job({{"run", "-np", "2", "--grace", "60", "sh", "-c",
            "[ $RANK = 1 ] && { sleep 0.2; exit 7; }; trap '' TERM; while [ ! -e enough ]; do sleep 0.05; done"}});
  EXPECT_TRUE(eventually([&] { return job.err().find("rank 1 failed: exit code 7") != std::string::npos; }))
      << job.err();
  EXPECT_TRUE(job.running());
  EXPECT_NE(job.err().find("1 rank is being told to end"), std::string::npos) << job.err();
  std::ofstream(job.folder() + "/enough").put('x');
  EXPECT_EQ(job.wait(), 7);
  EXPECT_EQ(job.err().find("rank 1 failed"), job.err().rfind("rank 1 failed: exit code 7")) << job.err();
  EXPECT_NE(job.err().find("all ranks have ended, after"), std::string::npos) << job.err();
}

TEST(LaunchSignals, GraceEndsInSigkill) {
  Job job(
      {{"run", "-np", "2", "--grace", "0.3", "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"}});
  ASSERT_TRUE(eventually([&] { return lines_of(job.out()).size() == 2; })) << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(LaunchSignals, ControlCClimbsFromIntOverTermToKill) {
  Job job({{"run", "-np", "2", "--grace", "1000", "sh", "-c",
            "trap 'echo int' INT; trap 'echo term' TERM; echo ready; while :; do sleep 0.05; done"}});
  const auto count = [&job](const char* word) {
    const auto lines = lines_of(job.out());
    return std::count_if(lines.begin(), lines.end(), [word](const auto& line) { return line.ends_with(word); });
  };
  ASSERT_TRUE(eventually([&] { return count("ready") == 2; })) << job.err();
  job.signal(SIGINT);
  ASSERT_TRUE(eventually([&] { return count("int") == 2; })) << job.out();
  ASSERT_TRUE(eventually([&] {
    return job.err().find("told to end by SIGINT; 2 ranks still running, ") != std::string::npos;
  })) << job.err();
  EXPECT_NE(job.err().find(" s until SIGTERM"), std::string::npos) << job.err();
  EXPECT_EQ(job.err().find("Ctrl-C again"), std::string::npos) << "nobody is at a terminal";
  job.signal(SIGINT);
  ASSERT_TRUE(eventually([&] { return count("term") == 2; })) << job.out();
  ASSERT_TRUE(eventually([&] { return job.err().find(" s until SIGKILL") != std::string::npos; })) << job.err();
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 130) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(LaunchSignals, WithoutAWordTheGraceClimbsToo) {
  Job job({{"run", "-np", "2", "--grace", "0.5", "sh", "-c",
            "trap 'echo int' INT; trap 'echo term; exit 0' TERM; echo ready; while :; do sleep 0.05; done"}});
  ASSERT_TRUE(eventually([&] { return lines_of(job.out()).size() == 2; })) << job.err();
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 130) << job.err();
  EXPECT_NE(job.log("rank-0.out").find("int\nterm\n"), std::string::npos) << job.log("rank-0.out");
}

TEST(LaunchSignals, WhatRanksLeaveCanBeKilledWithinItsGrace) {
  Job job({{"run", "-np", "1", "--grace", "1000", "sh", "-c",
            "(trap '' INT TERM; echo left; while :; do sleep 0.05; done) & trap 'exit 0' INT; wait"}});
  ASSERT_TRUE(eventually([&] { return job.out().find("left") != std::string::npos; })) << job.err();
  job.signal(SIGINT);
  ASSERT_TRUE(eventually([&] {
    return job.err().find("what the ranks have started is still running") != std::string::npos;
  })) << job.err();
  job.signal(SIGINT);
  job.signal(SIGTERM);
  ASSERT_TRUE(eventually([&] {
    job.signal(SIGINT);
    return !job.running();
  })) << job.err();
  EXPECT_EQ(job.wait(), 130) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(LaunchSignals, StopAndContinueReachTheRanks) {
  Job job({{"run", "-np", "2", "sleep", "1000"}});
  ASSERT_TRUE(eventually([&] { return job.processes("sleep 1000").size() == 2; })) << job.err();
  const auto ranks = job.processes("sleep 1000");
  const auto all = [&ranks](bool stopped) {
    return std::all_of(ranks.begin(), ranks.end(), [stopped](pid_t pid) {
      const auto stat = sys::process_stat(pid);
      return stat && (stat->state == 'T') == stopped;
    });
  };
  job.signal(SIGTSTP);
  EXPECT_TRUE(eventually([&] { return all(true); }));
  job.signal(SIGCONT);
  EXPECT_TRUE(eventually([&] { return all(false); }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
}

TEST(LaunchSignals, ControlCOnATerminal) {
  JobOptions options{{"run", "-np", "2", "sh", "-c", "echo ready; sleep 1000"}};
  options.terminal = true;
  options.environment = {"TERM=xterm", "NO_COLOR="};
  Job job(options);
  ASSERT_TRUE(eventually([&] {
    return job.screen().find("ready") != std::string::npos && job.processes("sleep 1000").size() == 2;
  })) << job.screen();
  EXPECT_NE(job.screen().find("\033[36m"), std::string::npos) << "no colour on a terminal";
  ASSERT_EQ(::write(job.terminal(), "\003", 1), 1);
  EXPECT_EQ(job.wait(), 130) << job.screen();
  EXPECT_NE(job.screen().find("told to end by SIGINT"), std::string::npos) << job.screen();
  EXPECT_TRUE(job.processes().empty());
}

TEST(LaunchSignals, TheCountdownSaysWhatAnotherControlCDoes) {
  JobOptions options{{"run", "-np", "1", "--grace", "1000", "sh", "-c",
                      "trap '' INT; echo ready; trap 'exit 0' TERM; while :; do sleep 0.05; done"}};
  options.terminal = true;
  Job job(options);
  ASSERT_TRUE(eventually([&] { return job.screen().find("ready") != std::string::npos; })) << job.screen();
  ASSERT_EQ(::write(job.terminal(), "\003", 1), 1);
  EXPECT_TRUE(eventually([&] { return job.screen().find("until SIGTERM; Ctrl-C again: now") != std::string::npos; }))
      << job.screen();
  ASSERT_EQ(::write(job.terminal(), "\003", 1), 1);
  EXPECT_EQ(job.wait(), 130) << job.screen();
}

TEST(LaunchSignals, TerminalInputAndQuestionsWithoutLineEnd) {
  JobOptions options{
      {"run", "-np", "2", "sh", "-c", "[ $RANK = 0 ] || exit 0; printf 'name? '; read name; echo hello $name"}};
  options.terminal = true;
  options.environment = {"TERM=xterm", "NO_COLOR=1"};
  Job job(options);
  ASSERT_TRUE(eventually([&] { return job.screen().find("name? ") != std::string::npos; })) << job.screen();
  ASSERT_EQ(::write(job.terminal(), "Ada\n", 4), 4);
  EXPECT_EQ(job.wait(), 0) << job.screen();
  EXPECT_NE(job.screen().find("hello Ada"), std::string::npos) << job.screen();
  EXPECT_EQ(job.screen().find("\033[36m"), std::string::npos) << "colour in spite of NO_COLOR";
}

TEST(LaunchSignals, AReaderThatGoesEndsTheJobQuietly) {
  JobOptions options{{"run", "-q", "-np", "2", "yes"}};
  options.pipe_output = true;
  Job job(options);
  char buffer[100];
  ASSERT_GT(::read(job.output(), buffer, sizeof buffer), 0);
  job.close_output();
  EXPECT_EQ(job.wait(), 141);
  EXPECT_EQ(job.err(), "");
  EXPECT_TRUE(job.processes().empty());
}

TEST(LaunchSignals, KilledWhileNobodyReadsTheOutput) {
  JobOptions options{{"run", "-q", "-np", "2", "yes"}};
  options.pipe_output = true;
  Job job(options);
  // Until the pipe is full: a job whose output fits into it ends with the first signal.
  int waiting = 0;
  const int full = ::fcntl(job.output(), F_GETPIPE_SZ);
  ASSERT_GT(full, 0);
  ASSERT_TRUE(eventually([&] { return ::ioctl(job.output(), FIONREAD, &waiting) == 0 && waiting > full - 4096; }));
  job.signal(SIGTERM);
  // The ranks end; the output that waits is given up with the second signal.
  ASSERT_TRUE(eventually([&] { return job.processes().size() == 1; })) << job.processes().size();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143);
}

/// More than a pipe holds, less than the agent may have under way to the supervisor.
constexpr const char* kMuch = "head -c 600000 /dev/zero | tr '\\0' x; exit 3";

TEST(LaunchSignals, OutputThatNobodyTakesIsGivenUpOnceTheJobIsOver) {
  JobOptions options{{"run", "-q", "-np", "1", "sh", "-c", kMuch}};
  options.pipe_output = true;
  Job job(options);
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_NE(job.err().find("complete logs are in runs/"), std::string::npos) << job.err();
  EXPECT_EQ(job.log("rank-0.out").size(), 600000U);
  EXPECT_NE(job.file("runs/latest/job.json").find("\"exit_status\": 3"), std::string::npos);
  EXPECT_TRUE(job.processes().empty());
}

TEST(LaunchSignals, ASlowReaderGetsEverything) {
  JobOptions options{{"run", "-q", "-np", "1", "--prefix", "none", "sh", "-c", kMuch}};
  options.pipe_output = true;
  Job job(options);
  ASSERT_TRUE(eventually([&] { return job.file("runs/latest/job.json").find("exit_status") != std::string::npos; }));
  // In all it takes longer than the limit of 10 s, but never long without a byte.
  std::string buffer(65536, '\0');
  std::size_t total = 0;
  while (true) {
    const auto got = ::read(job.output(), buffer.data(), buffer.size());
    if (got <= 0) break;
    total += static_cast<std::size_t>(got);
    std::this_thread::sleep_for(1500ms);
  }
  EXPECT_EQ(total, 600000U) << job.err();
  EXPECT_EQ(job.wait(), 3) << job.err();
}

TEST(LaunchRecord, SaysFromTheStartThatTheJobIsNotContained) {
  JobOptions options{{"run", "-np", "1", "sleep", "1000"}};
  options.environment = {"COHORT_LOG=info"};
  Job job(options);
  ASSERT_TRUE(eventually([&] { return job.file("runs/latest/job.json").find("}\n") != std::string::npos; }))
      << job.err();
  const std::string record = job.file("runs/latest/job.json");
  EXPECT_NE(record.find("\"contained\": false"), std::string::npos) << record;
  EXPECT_NE(record.find("no cgroup"), std::string::npos) << record;
  EXPECT_TRUE(eventually([&] { return job.err().find("is not contained") != std::string::npos; })) << job.err();
}

}  // namespace
}  // namespace cohort::test
