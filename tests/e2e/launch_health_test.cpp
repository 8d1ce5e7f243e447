// Jobs that do not go on: who holds them up is named, and they end.
#include "launch_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <regex>
#include <string>

namespace cohort::test {
namespace {

JobOptions job_of(const std::string& how, std::vector<std::string> options) {
  options.insert(options.begin(), {"run", "-np", "3"});
  options.insert(options.end(), {"--", HEALTH_PEER, how});
  return {std::move(options)};
}

/// The same on one host and on several, which one machine plays: how many ranks each has.
class LaunchHealth : public testing::TestWithParam<const char*> {
 protected:
  JobOptions job_of(const std::string& how, std::vector<std::string> options, const std::string& who = "1") const {
    JobOptions job = test::job_of(how, std::move(options));
    job.arguments.push_back(who);
    if (GetParam()[0] != '\0') job.environment.push_back(std::string("COHORT_PRETEND_HOSTS=") + GetParam());
    return job;
  }
};
std::string name_of(const testing::TestParamInfo<const char*>& hosts) {
  std::string name = hosts.param[0] == '\0' ? "one" : hosts.param;
  std::replace(name.begin(), name.end(), ',', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Hosts, LaunchHealth, testing::Values("", "1,2", "1,1,1"), name_of);

bool says(const std::string& text, const std::string& pattern) { return std::regex_search(text, std::regex(pattern)); }

TEST_P(LaunchHealth, RanksThatWaitForEachOtherEndTheJob) {
  const auto finished = run(job_of("deadlock", {"--deadlock-timeout", "2"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(says(finished.err,
                   "nothing can go on: rank 0 \\(.*, pid [0-9]+\\) waits in recv\\(float32\\[10\\]\\) for rank 1;"))
      << finished.err;
  EXPECT_TRUE(
      says(finished.err, "rank 1 \\(.*\\) waits in all_reduce\\(float32\\[10\\], sum\\), operation 2 for rank 0"))
      << finished.err;
  EXPECT_TRUE(says(finished.err, "ranks 1-2: waiting in all_reduce\\(float32\\[10\\], sum\\), operation 2\n"))
      << finished.err;
}

TEST_P(LaunchHealth, ARankThatHasEndedBeforeItFormedItsWorldEndsTheJob) {
  for (const std::string how : {"absent", "absent again"}) {
    if (how == "absent again" && GetParam()[0] != '\0') continue;  // it takes 3 s
    const auto finished = run(job_of(how, {}));
    EXPECT_EQ(finished.status, 124) << finished.err;
    EXPECT_TRUE(says(finished.err,
                     "cohort: rank 1 had ended with 0.* before it formed the world that ranks 0,2 wait for .*do all "
                     "ranks call it\\?"))
        << finished.err;
  }
}

TEST(LaunchOutput, LinesOfCAppearAtOnceThroughAPipe) {
  Job job(job_of("prints", {}));
  EXPECT_TRUE(eventually([&] { return says(job.out(), "printed before\n(.*\n)*.*printed after\n"); })) << job.out();
  job.signal(SIGTERM);
  job.wait();
}

TEST_P(LaunchHealth, MessagesInACircleEndTheJob) {
  const auto finished = run(job_of("circle", {"--deadlock-timeout", "2"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(says(finished.err, "rank " + std::to_string(rank) +
                                       " \\(.*\\) waits in recv\\(float32\\[10\\]\\) for rank " +
                                       std::to_string((rank + 1) % 3)))
        << finished.err;
  }
}

TEST_P(LaunchHealth, GroupsInDifferentOrdersEndTheJob) {
  const auto finished = run(job_of("crossed", {"--deadlock-timeout", "2"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(
      says(finished.err, "rank 0 \\(.*\\) waits in all_reduce\\(float32\\[10\\], sum\\), operation 3 for ranks 1-2;"))
      << finished.err;
  EXPECT_TRUE(
      says(finished.err, "rank 2 \\(.*\\) waits in all_reduce\\(float32\\[10\\], sum\\), operation 1 for rank 0 "))
      << finished.err;
}

// Threads of Cohort's own go on: the logging one meets the others', the agents collect what is traced.
TEST_P(LaunchHealth, LoggingHidesNoDeadlock) {
  JobOptions job = job_of("deadlock", {"--deadlock-timeout", "3", "--grace", "1", "--trace"});
  job.arguments.emplace_back("logging");
  const auto finished = run(job);
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(says(finished.err, "nothing can go on: rank 0 \\(.*\\) waits in recv\\(float32\\[10\\]\\) for rank 1;"))
      << finished.err;
}

TEST_P(LaunchHealth, LoggingHidesNoRankThatIsElsewhere) {
  JobOptions job = job_of("away", {"--stall-timeout", "3", "--grace", "1", "--trace"});
  job.arguments.emplace_back("logging");
  const auto finished = run(job);
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(
      says(finished.err, "rank 1 \\(.*\\) did not call all_reduce\\(float32\\[10\\], sum\\), operation 3 within"))
      << finished.err;
}

TEST(LaunchHealthLimits, AStoppedRankIsNamedAndEndsTheJob) {
  const auto finished = run(job_of("stopped", {"--stopped-timeout", "7"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(
      says(finished.err, "rank 1 \\(.*\\) has been stopped for [0-9]+ s \\(SIGSTOP.*kill -CONT [0-9]+ lets it go on"))
      << finished.err;
}

TEST_P(LaunchHealth, ARankThatIsElsewhereIsGivenUp) {
  const auto finished = run(job_of("away", {"--stall-timeout", "3"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(says(finished.err,
                   "rank 1 \\(.*\\) did not call all_reduce\\(float32\\[10\\], sum\\), operation 2 within [0-9]+ s; "
                   "ranks 0,2 were waiting"))
      << finished.err;
}

TEST_P(LaunchHealth, TheLastRankThatIsElsewhereIsNamed) {
  const auto finished = run(job_of("away", {"--stall-timeout", "3"}, "2"));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(says(finished.err,
                   "rank 2 \\(.*\\) did not call all_reduce\\(float32\\[10\\], sum\\), operation 2 within [0-9]+ "
                   "s; ranks 0-1 were waiting"))
      << finished.err;
}

TEST_P(LaunchHealth, ARankThatHasJoinedIsNotTakenForLate) {
  const auto finished = run(job_of("joined", {"--stall-timeout", "3"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(says(finished.err,
                   "rank 1 \\(.*\\) did not call (all_reduce|join)\\(.*\\), operation 2 within [0-9]+ s; "
                   "ranks 0,2 were waiting"))
      << finished.err;
  EXPECT_TRUE(says(finished.err, "rank 2: waiting in join\\(\\), operation 2")) << finished.err;
}

TEST(LaunchHealthLimits, LimitsOfZeroEndNothing) {
  Job job(job_of("deadlock", {"--deadlock-timeout", "0", "--stall-timeout", "0", "--timeout", "15"}));
  EXPECT_EQ(job.wait(), 124);
  EXPECT_TRUE(says(job.err(), "the time limit of 15 s is over")) << job.err();
}

TEST_P(LaunchHealth, QuitShowsWhatEveryRankDoesAndEndsNothing) {
  Job job(job_of("away", {}));
  ASSERT_TRUE(eventually([&] { return says(job.out(), "rank 1 is in"); })) << job.err();
  // It is asked again until all have come to where they stay.
  ASSERT_TRUE(eventually([&] {
    job.signal(SIGQUIT);
    return says(job.err(), "ranks 0,2: waiting in all_reduce\\(float32\\[10\\], sum\\), operation 2\n") &&
           says(job.err(), "rank 1: outside collectives after all_reduce\\(float32\\[10\\], sum\\), operation 1\n");
  })) << job.err();
  EXPECT_TRUE(job.running());
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
}

TEST(LaunchHealthLimits, ARankThatTakesItsTimeToEndIsStillTheFirst) {
  const auto finished = run(job_of("lingers", {}));
  EXPECT_EQ(finished.status, 5) << finished.err;
  EXPECT_TRUE(says(finished.err, "rank 1 failed: exit code 5")) << finished.err;
}

TEST(LaunchHealthLimits, WhatTheProgramCalledHasItsName) {
  const auto finished = run(job_of("asks", {"--grace", "20"}));
  EXPECT_EQ(finished.status, 128 + SIGKILL) << finished.err;
  EXPECT_TRUE(says(finished.err, "Preemption::requested: all_reduce\\(int32\\[1\\], max\\) failed -- rank [02] "))
      << finished.err;
}

TEST_P(LaunchHealth, ThePostMortemSaysWhereTheRanksWere) {
  const auto finished = run(job_of("dies", {}));
  EXPECT_EQ(finished.status, 128 + SIGKILL) << finished.err;
  EXPECT_TRUE(says(finished.err, "rank 1 failed: killed by SIGKILL")) << finished.err;
  EXPECT_TRUE(
      says(finished.err, "it was outside collectives after all_reduce\\(float32\\[10\\], sum\\), operation 1\n"))
      << finished.err;
  EXPECT_TRUE(says(finished.err, "then, rank")) << finished.err;
}

}  // namespace
}  // namespace cohort::test
