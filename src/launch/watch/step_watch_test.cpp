#include "launch/watch/step_watch.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <vector>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Two ranks that report once a second.
class Progress {
 public:
  explicit Progress(const StepLimits& limits = {}) : watch_(limits) {}

  std::vector<Warning> steps(int number, milliseconds each) {
    std::vector<Warning> all;
    for (int i = 0; i < number; ++i) {
      now_ += each;
      ++step_;
      if (now_ - looked_ >= seconds(1)) add(all);
    }
    return all;
  }
  std::vector<Warning> nothing(seconds time) {
    std::vector<Warning> all;
    for (seconds passed(0); passed < time; passed += seconds(1)) {
      now_ += seconds(1);
      add(all);
    }
    return all;
  }
  StepWatch& watch() { return watch_; }
  RankReport report(int rank) const {
    RankReport report;
    report.rank = rank;
    report.step = step_;
    return report;
  }
  void sleep(seconds time) { now_ += time; }
  StepWatch::Clock::time_point now() const { return now_; }

 private:
  void add(std::vector<Warning>& all) {
    looked_ = now_;
    for (int rank = 0; rank < 2; ++rank) watch_.report(report(rank), now_);
    for (Warning& warning : watch_.judge(now_)) all.push_back(std::move(warning));
  }

  StepWatch watch_;
  std::int64_t step_ = 0;
  StepWatch::Clock::time_point now_{seconds(1000)}, looked_{};
};

TEST(StepWatch, StepsThatTakeTwiceAsLongAreToldOnce) {
  Progress run;
  EXPECT_TRUE(run.steps(200, milliseconds(100)).empty());
  EXPECT_TRUE(run.steps(200, milliseconds(190)).empty()) << "not twice as long";
  EXPECT_TRUE(run.steps(200, milliseconds(100)).empty());
  const auto slow = run.steps(100, milliseconds(350));
  ASSERT_EQ(slow.size(), 1U);
  EXPECT_EQ(slow[0].kind, WarningKind::StepTime);
  EXPECT_NE(slow[0].text.find("a step takes 350 ms, "), std::string::npos) << slow[0].text;
  EXPECT_GT(*slow[0].step, 600);
  EXPECT_TRUE(run.steps(50, milliseconds(100)).empty());
  EXPECT_EQ(run.steps(100, milliseconds(400)).size(), 1U) << "again, after it was well";
}

TEST(StepWatch, AnEvaluationNowAndThenIsNoSlowStep) {
  Progress run;
  for (int epoch = 0; epoch < 10; ++epoch) {
    EXPECT_TRUE(run.steps(100, milliseconds(100)).empty());
    EXPECT_TRUE(run.nothing(seconds(60)).empty());
  }
}

TEST(StepWatch, AStandstillIsToldOnce) {
  Progress run;
  EXPECT_TRUE(run.nothing(seconds(2000)).empty()) << "it counts no steps";
  EXPECT_TRUE(run.steps(20, milliseconds(100)).empty());
  EXPECT_TRUE(run.nothing(seconds(590)).empty());
  const auto still = run.nothing(seconds(1000));
  ASSERT_EQ(still.size(), 1U);
  EXPECT_EQ(still[0].kind, WarningKind::NoStep);
  EXPECT_EQ(still[0].step, 20);
  EXPECT_TRUE(run.steps(20, milliseconds(100)).empty());
  EXPECT_EQ(run.nothing(seconds(700)).size(), 1U) << "once more, after it went on";
  for (int rank = 0; rank < 2; ++rank) run.watch().ended(rank);
  run.sleep(seconds(1));
  EXPECT_TRUE(run.watch().judge(run.now() + seconds(5000)).empty()) << "nobody runs";
  Progress never({.no_step = seconds(0)});
  never.steps(20, milliseconds(100));
  EXPECT_TRUE(never.nothing(seconds(5000)).empty());
}

TEST(StepWatch, WhileTheLauncherDidNotRunNothingIsLate) {
  Progress run;
  run.steps(20, milliseconds(100));
  run.sleep(seconds(3600));
  EXPECT_TRUE(run.nothing(seconds(500)).empty());
}

TEST(StepWatch, ALossThatIsNoNumberIsToldOnceForEachRank) {
  Progress run;
  RankReport report = run.report(1);
  report.not_finite = "train_loss is NaN";
  report.not_finite_step = 7;
  for (int i = 0; i < 3; ++i) run.watch().report(report, run.now());
  const auto found = run.watch().judge(run.now());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].kind, WarningKind::NotFinite);
  EXPECT_EQ(found[0].rank, 1);
  EXPECT_EQ(found[0].step, 7);
  EXPECT_TRUE(found[0].text.starts_with("train_loss is NaN at step 7, reported by rank 1")) << found[0].text;
}

TEST(Repeats, EachKindAndRankComesAgainLaterAndLater) {
  Repeats repeats;
  const Warning late{.kind = WarningKind::LateRank, .text = "a", .rank = 1, .step = 3};
  int told = 0;
  for (int second = 0; second < 36'000; ++second) told += repeats.lets_through(late, second) ? 1 : 0;
  // At 0, 1, 3, 7, 15, 31, 63 and 123 minutes, then each hour.
  EXPECT_EQ(told, 15);
  EXPECT_TRUE(repeats.lets_through({.kind = WarningKind::LateRank, .text = "a", .rank = 2, .step = {}}, 36'000));
  EXPECT_TRUE(repeats.lets_through({.kind = WarningKind::Stopped, .text = "a", .rank = 1, .step = {}}, 36'000));
  for (int rank = 10; rank < 10'000; ++rank)
    (void)repeats.lets_through({.kind = WarningKind::Stopped, .text = "", .rank = rank, .step = {}}, 0);
  EXPECT_FALSE(repeats.lets_through({.kind = WarningKind::DiskFull, .text = "a", .rank = {}, .step = {}}, 1e9))
      << "bounded";
}

TEST(Warning, IsALineOfJson) {
  const std::string line =
      warning_line({.kind = WarningKind::NoStep, .text = "a \"b\"\n\xFF", .rank = {}, .step = 3}, 12.3456);
  EXPECT_TRUE(line.ends_with("\n"));
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto read = nlohmann::json::parse(line);
  EXPECT_EQ(read["event"], "warning");
  EXPECT_EQ(read["kind"], "no_step");
  EXPECT_EQ(read["time"], 12.346);
  EXPECT_EQ(read["step"], 3);
  EXPECT_FALSE(read.contains("rank"));
}

}  // namespace
}  // namespace cohort::launch
