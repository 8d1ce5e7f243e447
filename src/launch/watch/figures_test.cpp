#include "launch/watch/figures.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;
using Clock = Figures::Clock;

RankReport at(int rank, std::int64_t step, std::uint64_t waited_ms, std::uint64_t exposed_ms = 0) {
  RankReport report;
  report.rank = rank;
  report.joined = true;
  report.state = 'R';
  report.step = step;
  report.samples = static_cast<std::int64_t>(static_cast<std::uint64_t>(step) * 32);
  report.exposed_ns = exposed_ms * 1'000'000;
  report.memory = 1 << 20;
  GroupReport group;
  group.id = 1;
  group.begun = group.ended = static_cast<std::uint64_t>(step);
  group.operation = "barrier()";
  group.waited_ns = waited_ms * 1'000'000;
  report.groups = {group};
  return report;
}

TEST(Figures, TheLateRankIsTheOneThatTheOthersWaitFor) {
  Figures figures(4);
  // Ten steps a second; ranks 0, 1 and 3 wait 40 ms of each for rank 2.
  for (int tick = 0; tick <= 50; ++tick) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto step = static_cast<std::uint64_t>(tick) * 4;
      figures.report(at(rank, static_cast<std::int64_t>(step), rank == 2 ? step : step * 40, rank == 2 ? 0 : step * 50),
                     Clock::time_point(tick * 400ms));
    }
  }
  const auto all = figures.look(Clock::time_point(50 * 400ms));
  ASSERT_EQ(all.size(), 4U);
  EXPECT_NEAR(all[2].waited_for, 0.39, 0.01);
  for (const int rank : {0, 1, 3}) {
    EXPECT_NEAR(all[static_cast<std::size_t>(rank)].waited, 0.4, 0.01);
    EXPECT_NEAR(all[static_cast<std::size_t>(rank)].exposed, 0.5, 0.01);
    EXPECT_EQ(all[static_cast<std::size_t>(rank)].waited_for, 0);
  }
  EXPECT_NEAR(all[0].steps_per_second, 10, 0.01);
  EXPECT_NEAR(all[0].samples_per_second, 320, 0.3);
  EXPECT_EQ(all[0].step, 200);
  EXPECT_EQ(all[0].samples, 6400);
  EXPECT_EQ(all[0].state, "running");
  EXPECT_EQ(all[0].memory, 1U << 20);
}

TEST(Figures, OfTwoRanksAsWell) {
  Figures figures(2);
  for (int second = 0; second <= 12; ++second) {
    figures.report(at(0, second, static_cast<std::uint64_t>(second) * 500), Clock::time_point(second * 1s));
    figures.report(at(1, second, 0), Clock::time_point(second * 1s));
  }
  const auto all = figures.look(Clock::time_point(12s));
  EXPECT_NEAR(all[1].waited_for, 0.5, 0.01);
  EXPECT_EQ(all[0].waited_for, 0);
}

TEST(Figures, AWaitThatHasNotEndedCounts) {
  Figures figures(2);
  RankReport waiting = at(0, 3, 0);
  waiting.groups[0].begun = 4;
  waiting.groups[0].waiting = true;
  for (int second = 0; second <= 20; ++second) {
    figures.report(waiting, Clock::time_point(second * 1s));
    figures.report(at(1, 3, 0), Clock::time_point(second * 1s));
  }
  const auto all = figures.look(Clock::time_point(20s));
  EXPECT_EQ(all[0].state, "waiting");
  EXPECT_NE(all[0].doing.find("waiting in barrier()"), std::string::npos);
  EXPECT_NEAR(all[0].waited, 1, 0.01);
  EXPECT_NEAR(all[0].exposed, 1, 0.01);
  EXPECT_NEAR(all[1].waited_for, 1, 0.01);
  EXPECT_EQ(all[0].steps_per_second, 0);
}

TEST(Figures, StepsThatAreSlowerThanTheWindowHaveARateAndAHaltHasNone) {
  Figures figures(1);
  for (int second = 0; second <= 90; ++second) figures.report(at(0, second / 15, 0), Clock::time_point(second * 1s));
  EXPECT_NEAR(figures.look(Clock::time_point(90s))[0].steps_per_second, 1 / 15.0, 0.001);
  EXPECT_EQ(figures.look(Clock::time_point(200s))[0].steps_per_second, 0);
}

TEST(Figures, HowRanksEndStays) {
  Figures figures(3);
  figures.report(at(0, 5, 0), Clock::time_point(1s));
  figures.ended(0, true, "exit status 0");
  figures.ended(1, false, "SIGKILL");
  figures.report(at(0, 7, 0), Clock::time_point(2s));  // from before its end, on another way
  const auto all = figures.look(Clock::time_point(3s));
  EXPECT_EQ(all[0].state, "ended");
  EXPECT_EQ(all[0].step, 5);
  EXPECT_EQ(all[1].state, "failed");
  EXPECT_EQ(all[1].doing, "SIGKILL");
  EXPECT_EQ(all[2].state, "starting");
}

TEST(Figures, WhateverARankWritesTheyAreNumbers) {
  Figures figures(2);
  RankReport wild = at(1, std::numeric_limits<std::int64_t>::min(), 0);
  wild.samples = std::numeric_limits<std::int64_t>::max();
  wild.groups[0].waited_ns = std::numeric_limits<std::uint64_t>::max();
  wild.exposed_ns = std::numeric_limits<std::uint64_t>::max();
  wild.rank = 1;
  figures.report(at(1, 4, 10), Clock::time_point(0s));
  figures.report(wild, Clock::time_point(1s));
  figures.report(at(1, std::numeric_limits<std::int64_t>::max(), 0), Clock::time_point(2s));
  wild.rank = 7;
  figures.report(wild, Clock::time_point(2s));
  for (const RankFigures& one : figures.look(Clock::time_point(3s))) {
    EXPECT_GE(one.step, 0);
    EXPECT_GE(one.samples, 0);
    EXPECT_GE(one.steps_per_second, 0);
    EXPECT_LE(one.waited, 1);
    EXPECT_LE(one.exposed, 1);
  }
}

}  // namespace
}  // namespace cohort::launch
