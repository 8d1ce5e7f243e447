// Jobs that are preempted: wherever the signal comes, all ranks save at the same step, and the job ends with
// the status that asks for a requeue. And what becomes of programs that know nothing of that.
#include "launch_harness.h"

#include <cohort/preemption.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

/// Receivers of a signal.
enum class To { Command, OneRank, LastRank, AllRanks, Agent, Guard, AgentAndAllRanks };

std::size_t count(const std::string& text, const std::string& part) {
  const auto lines = lines_of(text);
  return static_cast<std::size_t>(std::count_if(
      lines.begin(), lines.end(), [&part](const std::string& line) { return line.find(part) != std::string::npos; }));
}

class PreemptionJob : public testing::Test {
 protected:
  /// Begins a job whose ranks train.
  void start(std::vector<std::string> options, const std::vector<std::string>& arguments, int ranks = 2) {
    ranks_ = ranks;
    JobOptions job;
    job.arguments = {"run", "-np", std::to_string(ranks)};
    job.arguments.insert(job.arguments.end(), options.begin(), options.end());
    job.arguments.emplace_back(PREEMPTION_PEER);
    job.arguments.insert(job.arguments.end(), arguments.begin(), arguments.end());
    job_ = std::make_unique<Job>(job);
    ASSERT_TRUE(eventually([this] { return count(job_->out(), "trains") == static_cast<std::size_t>(ranks_); }))
        << job_->err();
  }
  std::vector<pid_t> ranks() const { return job_->processes(PREEMPTION_PEER); }
  void send(To to, int signal) {
    const std::vector<pid_t> pids = ranks();
    ASSERT_EQ(pids.size(), static_cast<std::size_t>(ranks_));
    switch (to) {
      case To::Command: return job_->signal(signal);
      case To::OneRank: ::kill(pids.front(), signal); return;
      case To::LastRank: ::kill(pids.back(), signal); return;
      case To::AllRanks:
        for (const pid_t pid : pids) ::kill(pid, signal);
        return;
      case To::Agent: ::kill(job_->agent(), signal); return;
      case To::Guard: ::kill(job_->guard(), signal); return;
      case To::AgentAndAllRanks:
        ::kill(job_->agent(), signal);
        for (const pid_t pid : pids) ::kill(pid, signal);
        return;
    }
  }
  /// All ranks saved, at the same step, and the job asks for a requeue.
  void expect_saved(int signal) {
    EXPECT_EQ(job_->wait(), kRequeueStatus) << job_->err();
    std::set<std::string> steps;
    for (const std::string& line : lines_of(job_->out())) {
      if (const auto at = line.find("saved at step"); at != std::string::npos) steps.insert(line.substr(at));
    }
    EXPECT_EQ(count(job_->out(), "saved at step"), static_cast<std::size_t>(ranks_)) << job_->out();
    ASSERT_EQ(steps.size(), 1U) << job_->out();
    EXPECT_TRUE(steps.begin()->ends_with("because of " + std::to_string(signal))) << *steps.begin();
    const std::string name = signal == SIGUSR1 ? "SIGUSR1" : "SIGTERM";
    EXPECT_NE(job_->err().find("cohort: asked to end by " + name + "; all " + std::to_string(ranks_) +
                               " ranks have saved and ended, after "),
              std::string::npos)
        << job_->err();
    EXPECT_NE(job_->err().find("exit status 75 asks for a requeue"), std::string::npos) << job_->err();
    EXPECT_EQ(job_->err().find("failed"), std::string::npos) << job_->err();
    EXPECT_EQ(job_->err().find("again"), std::string::npos) << "restarted: " << job_->err();
    EXPECT_TRUE(job_->processes().empty());
  }
  std::unique_ptr<Job> job_;
  int ranks_ = 0;
};

struct Case {
  const char* name;
  To to;
  int signal;
};

class PreemptionSignal : public PreemptionJob, public testing::WithParamInterface<Case> {};

TEST_P(PreemptionSignal, AllRanksSaveAtTheSameStepAndTheJobAsksForARequeue) {
  start({"--max-restarts", "2"}, {"0"});
  send(GetParam().to, GetParam().signal);
  expect_saved(GetParam().signal);
}
INSTANTIATE_TEST_SUITE_P(
    Everywhere, PreemptionSignal,
    testing::Values(Case{"Usr1ToTheCommand", To::Command, SIGUSR1}, Case{"Usr1ToOneRank", To::OneRank, SIGUSR1},
                    Case{"Usr1ToAllRanks", To::AllRanks, SIGUSR1}, Case{"Usr1ToTheAgent", To::Agent, SIGUSR1},
                    Case{"Usr1ToTheGuard", To::Guard, SIGUSR1}, Case{"TermToOneRank", To::LastRank, SIGTERM},
                    Case{"TermToTheAgent", To::Agent, SIGTERM}, Case{"TermToTheGuard", To::Guard, SIGTERM},
                    Case{"TermToTheAgentAndAllRanks", To::AgentAndAllRanks, SIGTERM}),
    [](const auto& test) { return std::string(test.param.name); });

// A terminal that is closed, or a connection of ssh that is lost, costs no work.
TEST_F(PreemptionJob, RanksSaveWhenTheCommandLosesItsTerminal) {
  start({}, {"50"});
  job_->signal(SIGHUP);
  EXPECT_EQ(job_->wait(), kRequeueStatus) << job_->err();
  EXPECT_EQ(count(job_->out(), "saved at step"), 2U) << job_->out();
}

TEST_F(PreemptionJob, ASignalToTheAgentOfOneHostReachesTheRanksOfAll) {
  start({"-H", "a:2,b:2", "--starter", "local"}, {"0", "every=3"}, 4);
  send(To::Agent, SIGUSR1);
  expect_saved(SIGUSR1);
}

// Does as a batch system does: agents and ranks of all hosts, in any order, some of them after ranks have ended.
TEST_F(PreemptionJob, OneRequestToEveryProcessOfSeveralHostsIsOneRequest) {
  for (const int pause_us : {0, 300, 3000, 20000}) {
    start({"-H", "a:2,b:2", "--starter", "local", "--grace", "20"}, {"50"}, 4);
    std::vector<pid_t> all = job_->processes();
    for (const pid_t command : job_->processes(COHORT_COMMAND " run")) std::erase(all, command);  // the batch script's
    std::shuffle(all.begin(), all.end(), std::minstd_rand(static_cast<unsigned>(pause_us)));
    for (const pid_t pid : all) {
      ::kill(pid, SIGTERM);
      ::usleep(static_cast<useconds_t>(pause_us));
    }
    expect_saved(SIGTERM);
  }
}

// Loaders of data, say: a rank needs them until it has saved, and only then they are told.
TEST_F(PreemptionJob, WhatARankHasStartedLivesUntilItHasSaved) {
  for (const To to : {To::Command, To::Agent}) {
    start({}, {"300", "helper"});
    if (to == To::Command)
      job_->signal(SIGTERM);
    else
      ::kill(job_->agent(), SIGTERM);
    expect_saved(SIGTERM);
  }
}

TEST_F(PreemptionJob, SoItDoesInAnElasticJob) {
  start({"--min-np", "1"}, {"300", "helper"});
  job_->signal(SIGTERM);
  expect_saved(SIGTERM);
}

TEST_F(PreemptionJob, AShellAroundARankGivesItsStatusAndDoesNotGoOn) {
  const char* const then[] = {"exit $?", "echo went on; sleep 60; echo and on"};
  for (const char* const next : then) {
    start({"--grace", "20", "sh", "-c", std::string("\"$0\" \"$@\"; ") + next}, {"100", "helper"});
    job_->signal(SIGTERM);
    if (next == then[0]) {
      expect_saved(SIGTERM);
      continue;
    }
    EXPECT_EQ(job_->wait(), 128 + SIGTERM) << job_->err();
    EXPECT_EQ(count(job_->out(), "saved at step"), 2U) << job_->out();
    EXPECT_EQ(count(job_->out(), "and on"), 0U) << job_->out();
    EXPECT_TRUE(job_->processes().empty());
  }
}

// The command is killed, and on the other host it is gone with its connection: ranks still reach each other.
TEST_F(PreemptionJob, RanksSaveTogetherWhenTheirLauncherIsKilled) {
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--min-np", "1"}}) {
    std::vector<std::string> options = {"-H", "a:2,b:2", "--starter", "local", "--run-dir", "run"};
    options.insert(options.end(), more.begin(), more.end());
    start(options, {"300", "helper"}, 4);
    job_->signal(SIGKILL);
    EXPECT_EQ(job_->wait(), 128 + SIGKILL);
    EXPECT_TRUE(eventually([this] { return job_->processes().empty(); })) << "something is left";
    std::set<std::string> steps;
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::string log = job_->file("run/logs/rank-" + std::to_string(rank) + ".out");
      const auto at = log.find("saved at step");
      EXPECT_NE(at, log.npos) << "rank " << rank << ": " << log;
      if (at != log.npos) steps.insert(log.substr(at));
    }
    EXPECT_EQ(steps.size(), 1U);
  }
}

// Until then the run's folder is taken.
TEST_F(PreemptionJob, WhoDoesNotSaveInTimeIsKilledWhenItsLauncherWas) {
  start({"--run-dir", "run"}, {"60000"});
  job_->signal(SIGKILL);
  job_->wait();
  const auto since = std::chrono::steady_clock::now();
  const auto second = run({{"run", "-np", "1", "--run-dir", job_->folder() + "/run", "true"}});
  EXPECT_NE(second.status, 0);
  EXPECT_NE(second.err.find("another job is running in it"), std::string::npos) << second.err;
  EXPECT_TRUE(eventually([this] { return job_->processes().empty(); }, std::chrono::seconds(30)));
  EXPECT_GE(std::chrono::steady_clock::now() - since, std::chrono::seconds(9));
  EXPECT_EQ(run({{"run", "-np", "1", "--run-dir", job_->folder() + "/run", "true"}}).status, 0);
}

TEST_F(PreemptionJob, ARankIsToldOnceMoreOnItsWayOut) {
  start({}, {"0", "leave"});
  const std::vector<pid_t> ending = ranks();
  send(To::OneRank, SIGUSR1);
  ASSERT_TRUE(eventually([this] { return count(job_->out(), "left") == 2; })) << job_->out();
  for (const pid_t pid : ending) {
    for (const int signal : {SIGUSR1, SIGTERM}) EXPECT_EQ(::kill(pid, signal), 0) << "it was not told";
  }
  expect_saved(SIGUSR1);
}

TEST_F(PreemptionJob, SigtermGivesRanksThatSaveLongerThanTheGrace) {
  start({"--grace", "0.2"}, {"2500"});
  send(To::Command, SIGTERM);
  expect_saved(SIGTERM);
}

TEST_F(PreemptionJob, AGraceThatIsTooShortIsSaidToBe) {
  start({"--grace", "0.2", "--preempt-grace", "0.5"}, {"60000"});
  send(To::Command, SIGTERM);
  EXPECT_EQ(job_->wait(), 143) << job_->err();
  EXPECT_NE(job_->err().find("told to end by SIGTERM"), std::string::npos) << job_->err();
  EXPECT_EQ(job_->err().find("requeue"), std::string::npos) << job_->err();
}

TEST_F(PreemptionJob, ARankThatIsLostWhileItSavesIsNotStartedAgain) {
  start({"--max-restarts", "2", "--grace", "0.2"}, {"60000"});
  send(To::Command, SIGUSR1);
  ASSERT_TRUE(eventually([this] { return count(job_->out(), " saves") == 2U; })) << job_->err();
  send(To::OneRank, SIGKILL);
  EXPECT_EQ(job_->wait(), 128 + SIGKILL) << job_->err();
  EXPECT_EQ(job_->err().find("again"), std::string::npos) << "restarted: " << job_->err();
}

TEST_F(PreemptionJob, OneRankThatSavesAloneDoesNotLeaveTheOthersWaiting) {
  start({"--preempt-grace", "0.5", "--grace", "0.2"}, {"0", "alone"});
  send(To::Command, SIGUSR1);
  EXPECT_EQ(job_->wait(), 124) << job_->err();
  EXPECT_NE(job_->err().find("rank 0 has saved and ended (exit status 75), and 1 other rank is still running"),
            std::string::npos)
      << job_->err();
}

TEST(PreemptionPrograms, AnyProgramMayAskForARequeueByItsStatus) {
  const Finished done = run({{"run", "-np", "2", "--max-restarts", "2", "sh", "-c", "exit 75"}});
  EXPECT_EQ(done.status, kRequeueStatus) << done.err;
  EXPECT_NE(done.err.find("all 2 ranks have ended, after"), std::string::npos) << done.err;
  const Finished some = run({{"run", "-np", "2", "sh", "-c", "[ $RANK = 0 ] || exit 75"}});
  EXPECT_EQ(some.status, kRequeueStatus) << some.err;
  EXPECT_NE(some.err.find("1 of 2 ranks has ended"), std::string::npos) << some.err;
}

TEST(PreemptionPrograms, AFailureBesideItIsAFailure) {
  const Finished done = run({{"run", "-np", "2", "sh", "-c", "[ $RANK = 0 ] && exit 75; sleep 0.2; exit 3"}});
  EXPECT_EQ(done.status, 3) << done.err;
  EXPECT_NE(done.err.find("rank 1 failed: exit code 3"), std::string::npos) << done.err;
}

TEST(PreemptionPrograms, TheRequeueIsAnEventAndInTheRecord) {
  Job job({{"run", "-np", "1", "--json", "--run-dir", "run", "sh", "-c", "exit 75"}});
  EXPECT_EQ(job.wait(), kRequeueStatus);
  EXPECT_NE(job.out().find(R"("exit_status":75,"reason":"the rank has ended")"), std::string::npos) << job.out();
  EXPECT_NE(job.out().find(R"("again":false,"requeue":true})"), std::string::npos) << job.out();
  EXPECT_NE(job.file("run/job.json").find("\"reason\": \"the rank has ended\""), std::string::npos);
}

TEST(PreemptionPrograms, ASignalWaitsUntilARankHasAHandlerAndEndsNoHelper) {
  Job job({{"run", "-np", "2", "sh", "-c",
            "sleep 1000 & echo begun; while [ ! -e enough ]; do sleep 0.05; done;"
            "trap 'echo got it; kill $!; exit 75' USR1; echo ready; wait; echo the helper has ended"}});
  ASSERT_TRUE(eventually([&] { return count(job.out(), "begun") == 2; })) << job.err();
  job.signal(SIGUSR1);
  EXPECT_TRUE(eventually([&] {
    return job.err().find("ranks 0-1 have no handler for SIGUSR1, which would end them; it is kept") !=
           std::string::npos;
  })) << job.err();
  EXPECT_TRUE(job.running());
  std::ofstream(job.folder() + "/enough").put('x');
  EXPECT_EQ(job.wait(), kRequeueStatus) << job.err();
  EXPECT_EQ(count(job.out(), "got it"), 2U) << job.out();
  EXPECT_EQ(count(job.out(), "the helper has ended"), 0U) << job.out();
}

}  // namespace
}  // namespace cohort::test
