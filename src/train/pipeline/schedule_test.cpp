// Schedules of pipelines with random ranks, micro-batches, chunks and delays. Tests that no rank waits for ever, that
// each action comes once, and that memory and idle time are as documented.
#include "train/pipeline/schedule.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <tuple>

namespace cohort::pipeline {
namespace {

constexpr Schedule kAll[] = {Schedule::GPipe, Schedule::OneFOneB, Schedule::Interleaved, Schedule::ZeroBubble};

std::vector<std::vector<Action>> all_ranks(const Layout& layout) {
  std::vector<std::vector<Action>> ranks;
  for (int rank = 0; rank < layout.ranks; ++rank) ranks.push_back(actions_of(layout, rank));
  return ranks;
}

std::string text(const Layout& layout) {
  return std::string(to_string(layout.schedule)) + " p=" + std::to_string(layout.ranks) +
         " m=" + std::to_string(layout.micro_batches) + " v=" + std::to_string(layout.chunks);
}

Layout random_layout(std::mt19937& random, Schedule schedule) {
  const auto from = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
  Layout layout{.schedule = schedule, .ranks = from(1, 8), .micro_batches = from(1, 24)};
  if (schedule == Schedule::Interleaved) {
    layout.chunks = from(1, 4);
    layout.micro_batches = layout.ranks * from(1, 4);
  }
  return layout;
}

TEST(PipelineSchedule, HasEachActionOnceByAscendingMicroBatchAndKeepsItsMemory) {
  std::mt19937 random(1);
  for (int round = 0; round < 400; ++round) {
    const Layout layout = random_layout(random, kAll[round % 4]);
    const bool split = layout.schedule == Schedule::ZeroBubble;
    for (int rank = 0; rank < layout.ranks; ++rank) {
      std::map<std::pair<Kind, int>, int> next;  // micro-batch of the kind and stage
      int alive = 0, most = 0;
      for (const Action& action : actions_of(layout, rank)) {
        EXPECT_EQ(action.stage % layout.ranks, rank);
        EXPECT_EQ(action.micro_batch, (next[{action.kind, action.stage}]++)) << text(layout);
        if (action.kind == Kind::Forward) most = std::max(most, ++alive);
        if (action.kind == (split ? Kind::BackwardWeight : Kind::Backward)) --alive;
      }
      EXPECT_EQ(next.size(), static_cast<std::size_t>((split ? 3 : 2) * layout.chunks));
      for (const auto& [what, count] : next) EXPECT_EQ(count, layout.micro_batches);
      EXPECT_EQ(alive, 0);
      EXPECT_EQ(most, most_activations(layout, rank)) << text(layout) << " rank " << rank;
      if (layout.schedule == Schedule::OneFOneB || split) {
        EXPECT_LE(most, layout.ranks);
      }
      std::vector<Action> forwards;
      for (const Action& action : actions_of(layout, rank)) {
        if (action.kind == Kind::Forward) forwards.push_back(action);
      }
      EXPECT_EQ(forwards, forwards_of(layout, rank));
    }
  }
}

TEST(PipelineSchedule, NeverWaitsForEverOverRandomDelays) {
  std::mt19937 random(2);
  std::exponential_distribution<double> time(1);
  for (int round = 0; round < 4000; ++round) {
    const Layout layout = random_layout(random, kAll[round % 4]);
    const auto anything = [&](int, const Action&) { return time(random); };
    const Played played = play(all_ranks(layout), layout.stages(), anything,
                               [&](int, const Action&) { return round % 3 == 0 ? 0 : 5 * time(random); });
    ASSERT_TRUE(played.whole) << text(layout);
    // Only forwards, as in an evaluation.
    std::vector<std::vector<Action>> forwards;
    for (int rank = 0; rank < layout.ranks; ++rank) forwards.push_back(forwards_of(layout, rank));
    ASSERT_TRUE(play(forwards, layout.stages(), anything, anything).whole) << text(layout);
  }
  // A wrong schedule is found: one rank has its backwards in another order, both wait for each other.
  std::vector<std::vector<Action>> wrong = all_ranks({.ranks = 2, .micro_batches = 2});
  std::iter_swap(wrong[0].begin() + 1, wrong[0].begin() + 2);
  std::swap(wrong[1][0], wrong[1][2]);
  EXPECT_FALSE(play(wrong, 2, [](int, const Action&) { return 1.0; }).whole);
}

TEST(PipelineSchedule, IdlesAsTheorySays) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      for (const Schedule schedule : kAll) {
        for (int v = 1; v <= (schedule == Schedule::Interleaved ? 4 : 1); ++v) {
          const Layout layout{.schedule = schedule, .ranks = p, .micro_batches = m, .chunks = v};
          if (schedule == Schedule::Interleaved && m % p != 0) continue;
          if (schedule == Schedule::ZeroBubble && m < p) continue;  // there are too few micro-batches to fill all gaps
          const std::vector<StageCost> costs(static_cast<std::size_t>(layout.stages()));
          const int work = schedule == Schedule::ZeroBubble ? 3 * m : v * m;
          const double theory = (p - 1.0) / (work + p - 1);
          EXPECT_NEAR(expect(layout, costs).bubble, theory, 1e-9) << text(layout);
        }
      }
    }
  }
}

TEST(PipelineSchedule, RefusesWhatHasNone) {
  EXPECT_THROW(check({.ranks = 0}), Error);
  EXPECT_THROW(check({.micro_batches = 0}), Error);
  EXPECT_THROW(check({.schedule = Schedule::OneFOneB, .ranks = 2, .micro_batches = 4, .chunks = 2}), Error);
  EXPECT_THROW(check({.schedule = Schedule::Interleaved, .ranks = 4, .micro_batches = 6, .chunks = 2}), Error);
  const std::vector<StageCost> two(2);
  EXPECT_THROW(static_cast<void>(expect({.ranks = 3, .micro_batches = 3}, two)), Error);
}

TEST(PipelinePlan, CutsSoThatTheSlowestStageIsAsFastAsCanBe) {
  using Cuts = std::vector<std::int64_t>;
  const std::vector<double> even(9, 1), one_large = {1, 1, 1, 9, 1, 1};
  EXPECT_EQ(cut_by_cost(one_large, 3), (Cuts{3, 4}));
  const Cuts cuts = cut_by_cost(even, 4);
  EXPECT_EQ(cuts, (Cuts{2, 4, 6})) << "one of three layers, the others of two";
  EXPECT_EQ(cut_by_cost(even, 9), (Cuts{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(cut_by_cost(std::vector<double>(4, 0), 2), Cuts{2});
  for (const double cost : {1e308, 1.7e308, 1e200, 1e-320}) {  // sums and squares are not finite, or all 0
    EXPECT_EQ(cut_by_cost(std::vector<double>(4, cost), 2), Cuts{2}) << cost;
    const std::string said = describe({.ranks = 2}, std::vector<double>(4, cost), Cuts{2});
    EXPECT_NE(said.find("takes 1.00 of the mean"), std::string::npos) << said;
  }
  EXPECT_THROW(static_cast<void>(cut_by_cost(even, 10)), Error);
  EXPECT_THROW(static_cast<void>(cut_by_cost(std::vector<double>{1, -1}, 2)), Error);
  // Compares with all possible cuts.
  std::mt19937 random(3);
  std::exponential_distribution<double> cost(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> layers(static_cast<std::size_t>(4 + round % 6));
    for (double& layer : layers) layer = cost(random);
    const auto slowest = [&](std::size_t a, std::size_t b) {
      const auto sum = [&](std::size_t from, std::size_t to) {
        return std::accumulate(layers.begin() + static_cast<std::ptrdiff_t>(from),
                               layers.begin() + static_cast<std::ptrdiff_t>(to), 0.0);
      };
      return std::max({sum(0, a), sum(a, b), sum(b, layers.size())});
    };
    double best = INFINITY;
    for (std::size_t a = 1; a + 1 < layers.size(); ++a) {
      for (std::size_t b = a + 1; b < layers.size(); ++b) best = std::min(best, slowest(a, b));
    }
    const auto chosen = cut_by_cost(layers, 3);
    EXPECT_NEAR(slowest(static_cast<std::size_t>(chosen[0]), static_cast<std::size_t>(chosen[1])), best, 1e-12);
  }
}

TEST(PipelinePlan, SaysWhatItChoseAndExpects) {
  const Layout layout{.schedule = Schedule::OneFOneB, .ranks = 4, .micro_batches = 16};
  const std::vector<double> layers(8, 1);
  EXPECT_EQ(describe(layout, layers, cut_by_cost(layers, 4)),
            "pipeline: 1F1B over 4 ranks, 16 micro-batches; layers 0-1 | 2-3 | 4-5 | 6-7\n"
            "pipeline: the slowest stage takes 1.00 of the mean, expected bubble 15.8 %");
  const Layout interleaved{.schedule = Schedule::Interleaved, .ranks = 2, .micro_batches = 4, .chunks = 2};
  const std::vector<double> uneven = {1, 3, 2, 2, 2};
  EXPECT_EQ(describe(interleaved, uneven, cut_by_cost(uneven, 4)),
            "pipeline: interleaved 1F1B over 2 ranks with 2 chunks each, 4 micro-batches; layers 0-1 | 2 | 3 | 4\n"
            "pipeline: the slowest stage takes 1.60 of the mean, expected bubble 16.7 %");
}

}  // namespace
}  // namespace cohort::pipeline
