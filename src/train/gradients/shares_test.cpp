#include "train/gradients/shares.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/init.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <numeric>
#include <vector>

namespace cohort::gradients {
namespace {

using Counts = std::vector<std::int64_t>;

TEST(SampleShares, WholeNumbersOfAnExactSum) {
  EXPECT_EQ(counts_of({2, 1}, 64, false), (Counts{43, 21}));
  EXPECT_EQ(counts_of({1, 1, 1}, 64, false), (Counts{22, 21, 21}));
  EXPECT_EQ(counts_of({1, 0}, 7, false), (Counts{7, 0}));
  EXPECT_EQ(counts_of({1000, 1}, 64, true), (Counts{63, 1}));
  EXPECT_EQ(counts_of({1, 1}, 1, true), (Counts{1, 0}));
  EXPECT_EQ(counts_of({1, 1, .01, .01, .01, .01, .01, .01}, 16, true), (Counts{5, 5, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(counts_of({.1, 1, 1, 1, .05, .05}, 20, true), (Counts{1, 6, 6, 5, 1, 1}));
  for (std::int64_t global = 0; global < 200; ++global) {
    for (const bool each : {false, true}) {
      const Counts counts = counts_of({3.7, 0.2, 11, 1e-9}, global, each);
      EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), global);
      for (const std::int64_t count : counts) EXPECT_GE(count, each && global >= 4 ? 1 : 0);
    }
  }
}

TEST(SampleShares, PartsFollowEachOther) {
  const SampleShares given("2,1,1"), even, same("1,1,1");
  for (std::int64_t global = 0; global < 50; ++global) {
    for (const SampleShares* shares : {&given, &even, &same}) {
      std::int64_t before = 0;
      for (int rank = 0; rank < 3; ++rank) {
        const auto [begin, count] = shares->part(global, rank, 3, {0, 0});
        EXPECT_EQ(begin, before);
        before += count;
        EXPECT_EQ(same.part(global, rank, 3, {0, 0}), even.part(global, rank, 3, {0, 0}));
      }
      EXPECT_EQ(before, global);
    }
  }
}

TEST(SampleShares, WhatIsNoShareIsRefused) {
  for (const char* text : {"2,", "fast", "-1,2", "nan,1", "0,0", "inf,1", "1 ,2"})
    EXPECT_THROW(SampleShares{text}, Error) << text;
  EXPECT_THROW(SampleShares("2,1").require_world(3), Error);
  EXPECT_NO_THROW(SampleShares("measured").require_world(3));
}

// Ranks draw ahead like loaders, each by its own number of steps, and all change their shares at the same step.
TEST(SampleShares, MeasuredOnesBalanceAndUseEachSampleOnce) {
  constexpr std::int64_t kSize = 1000, kGlobal = 60, kEpochs = 6;
  constexpr double kFixed = 0.002, kEach[] = {0.001, 0.002, 0.004};  // seconds of a step, and of a sample
  std::vector<std::atomic<int>> used(kSize * kEpochs);
  std::vector<std::atomic<int>> last(3);
  run_on_threads(3, [&](Communicator comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    SampleShares shares("measured");
    shares.bind(step::ranks_of(comm));
    for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      std::int64_t drawn = 0;
      std::deque<std::int64_t> counts;
      while (true) {
        while (drawn < kSize && counts.size() <= 2 * rank) {
          const std::int64_t global = std::min(kGlobal, kSize - drawn);
          const auto part = shares.part(global, comm.rank(), 3, {epoch, drawn});
          for (std::int64_t i = 0; i < part.second; ++i)
            ++used[static_cast<std::size_t>(epoch * kSize + drawn + part.first + i)];
          if (global == kGlobal) last[rank] = static_cast<int>(part.second);
          counts.push_back(part.second);
          drawn += global;
        }
        if (counts.empty()) break;
        shares.begin_step(kGlobal, {epoch, drawn});
        const std::int64_t own = counts.front();
        counts.pop_front();
        shares.end_step(own, kFixed + kEach[rank] * static_cast<double>(own));
      }
    }
  });
  for (const auto& times : used) EXPECT_EQ(times, 1);
  double slowest = 0;
  for (std::size_t rank = 0; rank < 3; ++rank) slowest = std::max(slowest, kFixed + kEach[rank] * last[rank]);
  const double best = kFixed + kGlobal / (1 / kEach[0] + 1 / kEach[1] + 1 / kEach[2]);
  EXPECT_LT(slowest, 1.1 * best) << last[0] << ", " << last[1] << ", " << last[2];
}

}  // namespace
}  // namespace cohort::gradients
