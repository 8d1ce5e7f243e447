#include "launch/step_costs.h"

#include <gtest/gtest.h>

namespace cohort::launch {
namespace {

/// Two hosts with one rank each. A step spends 60 ms on the wire, in 4 operations with 8 MB in all.
std::vector<RankTimes> two_hosts(double exposed, double step = 0.1) {
  std::vector<RankTimes> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back({.rank = rank,
                     .host = rank == 0 ? "a" : "b",
                     .steps = 100,
                     .seconds = 100 * step,
                     .operations = 400,
                     .bytes = 800e6,
                     .busy = 6,
                     .waited = 0,
                     .wire = 6,
                     .exposed = 100 * exposed,
                     .wire_bytes = 800e6});
  }
  return ranks;
}

const Change* find(const std::vector<Change>& changes, const std::string& what) {
  for (const Change& change : changes)
    if (change.what.find(what) != std::string::npos) return &change;
  return nullptr;
}

PlanFacts without_codecs() {
  PlanFacts facts;
  for (FormatCosts& format : facts.formats) format.encode_ns = format.decode_ns = 0;
  return facts;
}

TEST(StepCosts, FewerBytesMakeTheSeenPartOfTheWireShorter) {
  const StepCosts costs = costs_of(two_hosts(0.045), 2);
  EXPECT_NEAR(costs.step.wire, 0.045, 1e-9);
  EXPECT_NEAR(costs.busy_wire, 0.06, 1e-9);  // 15 ms are hidden
  const auto changes = changes_of(costs, without_codecs());
  ASSERT_NE(find(changes, "bfloat16"), nullptr);
  EXPECT_NEAR(find(changes, "bfloat16")->step, 0.055 + 0.030 - 0.015, 1e-9);
  // With int8, the same time would be hidden, except for the last operation.
  EXPECT_NEAR(find(changes, "int8")->step, 0.055 + 0.060 / 4 * 8.125 / 32, 1e-9);
  EXPECT_EQ(best_of(changes, costs)->what, "int8 on the wire");  // int4 brings no 5 % more
  const std::string text = advice_of(costs, without_codecs());
  for (const char* part :
       {"45 % of each step (45.0 ms of 100 ms)", "brings 133 MB/s", "8.00 MB", "int8 on the wire", "1.7"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
}

TEST(StepCosts, CodecsAreCounted) {
  const StepCosts costs = costs_of(two_hosts(0.045), 2);
  PlanFacts slow;
  for (FormatCosts& format : slow.formats) format.encode_ns = 10;  // takes 80 ms for a rank's 8 MB
  EXPECT_GT(find(changes_of(costs, slow), "int4")->step, 0.1);
  EXPECT_EQ(best_of(changes_of(costs, slow), costs)->kind, Change::Kind::LocalSteps);
}

TEST(StepCosts, NothingIsRecommendedWhereTheWireIsHidden) {
  const StepCosts costs = costs_of(two_hosts(0.001), 2);
  EXPECT_FALSE(best_of(changes_of(costs, {}), costs));
  EXPECT_EQ(advice_of(costs, {}), "");
  EXPECT_NE(no_advice_of(costs).find("the wire is hidden behind computing: of 60.0 ms"), std::string::npos);
}

TEST(StepCosts, WhatIsInUseIsNotRecommended) {
  auto ranks = two_hosts(0.045);
  for (RankTimes& rank : ranks) rank.wire_bytes *= 8.125 / 32;
  const auto changes = changes_of(costs_of(ranks, 2), {});
  EXPECT_EQ(find(changes, "bfloat16"), nullptr);
  EXPECT_EQ(find(changes, "int8"), nullptr);
  EXPECT_NE(find(changes, "int4"), nullptr);
  for (RankTimes& rank : ranks) rank.wire_bytes = 5e9;  // no sums
  EXPECT_EQ(find(changes_of(costs_of(ranks, 2), {}), "on the wire"), nullptr);
}

TEST(StepCosts, FewerSynchronisationsWhereTheWireStaysMostOfAStep) {
  auto ranks = two_hosts(0.9, 1.0);
  for (RankTimes& rank : ranks) {
    rank.busy = rank.wire = 90;
    rank.wire_bytes *= 4.125 / 32;  // no format has fewer bytes
  }
  EXPECT_EQ(best_of(changes_of(costs_of(ranks, 2), {}), costs_of(ranks, 2))->kind, Change::Kind::LocalSteps);
}

TEST(StepCosts, SlowRanksAskForShares) {
  auto ranks = two_hosts(0);
  ranks[0].exposed = 5;  // it waits 50 of 100 ms for the other rank
  ranks[0].waited = 6;
  ranks[0].wire = 0;
  const StepCosts costs = costs_of(ranks, 2);
  EXPECT_NEAR(costs.balanced_compute, 2 / (1 / 0.05 + 1 / 0.1), 1e-9);
  const auto best = best_of(changes_of(costs, {}), costs);
  ASSERT_TRUE(best);
  EXPECT_EQ(best->kind, Change::Kind::Shares);
  EXPECT_NE(advice_of(costs, {}).find("rank 1 on host b computes for 100 ms, most for 50.0 ms"), std::string::npos);
}

TEST(StepCosts, OfOneHostOrWithoutStepsNothingIsSaid) {
  EXPECT_FALSE(takes_steps({}));
  EXPECT_FALSE(takes_steps({RankTimes()}));
  auto ranks = two_hosts(0.01);
  for (RankTimes& rank : ranks) rank.host = "a", rank.wire = rank.wire_bytes = 0;
  EXPECT_EQ(advice_of(costs_of(ranks, 1), {}), "");
  for (RankTimes& rank : ranks) rank.exposed = 0;  // it waits where that is not measured
  EXPECT_EQ(advice_of(costs_of(ranks, 2), {}), "");
}

TEST(StepCosts, LargerBucketsSaveLatencyAndHideLess) {
  PlanFacts facts;
  facts.latency = 0.005;
  const auto changes = changes_of(costs_of(two_hosts(0.045), 2), facts);
  ASSERT_NE(find(changes, "buckets"), nullptr);
  EXPECT_NEAR(find(changes, "buckets")->wire, 0.045, 1e-9);  // all of one bucket, since nothing hides its transfer
}

}  // namespace
}  // namespace cohort::launch
