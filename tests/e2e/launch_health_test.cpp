// Jobs that do not go on: who holds them up is named, and they end.
#include "launch_harness.h"

#include <gtest/gtest.h>

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

bool says(const std::string& text, const std::string& pattern) { return std::regex_search(text, std::regex(pattern)); }

TEST(LaunchHealth, RanksThatWaitForEachOtherEndTheJob) {
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

TEST(LaunchHealth, AStoppedRankIsNamedAndEndsTheJob) {
  const auto finished = run(job_of("stopped", {"--stopped-timeout", "7"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(
      says(finished.err, "rank 1 \\(.*\\) has been stopped for [0-9]+ s \\(SIGSTOP.*kill -CONT [0-9]+ lets it go on"))
      << finished.err;
}

TEST(LaunchHealth, ARankThatIsElsewhereIsGivenUp) {
  const auto finished = run(job_of("away", {"--stall-timeout", "3"}));
  EXPECT_EQ(finished.status, 124) << finished.err;
  EXPECT_TRUE(says(finished.err,
                   "rank 1 \\(.*\\) did not bring all_reduce\\(float32\\[10\\], sum\\), operation 2 in [0-9]+ s, in "
                   "which ranks 0,2 waited for it"))
      << finished.err;
}

TEST(LaunchHealth, LimitsOfZeroEndNothing) {
  Job job(job_of("deadlock", {"--deadlock-timeout", "0", "--stall-timeout", "0", "--timeout", "15"}));
  EXPECT_EQ(job.wait(), 124);
  EXPECT_TRUE(says(job.err(), "the time limit of 15 s is over")) << job.err();
}

TEST(LaunchHealth, QuitShowsWhatEveryRankDoesAndEndsNothing) {
  Job job(job_of("away", {}));
  ASSERT_TRUE(eventually([&] { return says(job.out(), "rank 1 is in"); })) << job.err();
  // It is asked again until the others have come to wait.
  ASSERT_TRUE(eventually([&] {
    job.signal(SIGQUIT);
    return says(job.err(), "ranks 0,2: waiting in all_reduce\\(float32\\[10\\], sum\\), operation 2\n");
  })) << job.err();
  EXPECT_TRUE(says(job.err(), "rank 1: outside collectives after all_reduce\\(float32\\[10\\], sum\\), operation 1\n"))
      << job.err();
  EXPECT_TRUE(job.running());
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
}

TEST(LaunchHealth, ARankThatTakesItsTimeToEndIsStillTheFirst) {
  const auto finished = run(job_of("lingers", {}));
  EXPECT_EQ(finished.status, 5) << finished.err;
  EXPECT_TRUE(says(finished.err, "rank 1 failed: exit code 5")) << finished.err;
}

TEST(LaunchHealth, ThePostMortemSaysWhereTheRanksWere) {
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
