// Tests from which step ranks go on: each rule, and many random schedules of ranks that are lost or join at any moment.
#include "train/elastic/agreement.h"

#include "base/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace cohort::elastic {
namespace {

Standing trained(std::int64_t steps) {
  return {.steps = steps, .fresh = false, .first_size = 4, .host = "h", .came_anew = false};
}

TEST(ElasticAgreement, NobodyHasTrained) {
  const Agreement agreement = value_or_throw(agree_on_step({{.steps = 7}, {.steps = 0}, {.steps = 0}}));
  EXPECT_TRUE(agreement.begins);
  EXPECT_EQ(agreement.steps, 7);
  EXPECT_EQ(agreement.sources, (std::vector{0, 1, 2}));
  EXPECT_EQ(agreement.first_size, 3);
}

TEST(ElasticAgreement, WhoComeAnewWhereOthersHadTrainedDoNotBegin) {
  Standing first{.steps = 4, .reached = 8, .checkpoint = "checkpoint 6 in /c"};
  const auto lost = agree_on_step({first, Standing{}});
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code(), ErrorCode::Unavailable);
  const std::string said = lost.error().what();
  EXPECT_NE(said.find("others had trained to step 8 in this attempt of the job"), std::string::npos) << said;
  EXPECT_NE(said.find("the state after step 4 -- go on from the last checkpoint, checkpoint 6 in /c: "),
            std::string::npos)
      << said;
  first.steps = 8;  // as after loading a checkpoint
  EXPECT_TRUE(value_or_throw(agree_on_step({first, Standing{}})).begins);
  first.steps = 4;
  Standing second{.came_anew = false};  // all ranks train a second time in one process
  EXPECT_TRUE(value_or_throw(agree_on_step({first, second})).begins);
  EXPECT_EQ(value_or_throw(agree_on_step({trained(9), first})).steps, 9);
  first.reached = kSomeSteps;
  EXPECT_FALSE(agree_on_step({first}));
  first.reached = -1;
  first.not_asked = "no answer";
  const auto unknown = agree_on_step({first});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code(), ErrorCode::Unavailable);
}

TEST(ElasticAgreement, TheFurthestWholeStateCounts) {
  Standing torn = trained(12);
  torn.whole = false;
  const Agreement agreement = value_or_throw(agree_on_step({trained(12), trained(13), Standing{}, torn, trained(13)}));
  EXPECT_FALSE(agreement.begins);
  EXPECT_EQ(agreement.steps, 13);
  EXPECT_EQ(agreement.sources, (std::vector{1, 4}));
  EXPECT_EQ(agreement.takers, (std::vector{0, 2, 3}));
  EXPECT_EQ(agreement.first_size, 4);
}

TEST(ElasticAgreement, WhoHasChangedItsParametersTakesThoseOfTheSameStep) {
  Standing torn = trained(12);
  torn.whole = false;
  EXPECT_EQ(value_or_throw(agree_on_step({torn, trained(12)})).sources, std::vector{1});
  const auto nobody = agree_on_step({torn, torn, Standing{}});
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code(), ErrorCode::Unavailable);
  EXPECT_NE(std::string(nobody.error().what()).find("rank 0 lost its world after step 13"), std::string::npos);
  EXPECT_FALSE(agree_on_step({torn, trained(11)})) << "a step that somebody has ended would be lost";
}

TEST(ElasticAgreement, StatesOfDifferentThingsAreRefused) {
  Standing one = trained(1), other = trained(1);
  one.names = {"model", "optimizer"};
  other.names = {"model"};
  const auto refused = agree_on_step({one, other});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::Mismatch);
  EXPECT_NE(std::string(refused.error().what()).find("'optimizer' is only in that of rank 0"), std::string::npos);
}

TEST(ElasticAgreement, MoreThanHalfAreRight) {
  const std::vector<Digest> a = {{1, 2}}, b = {{1, 3}};
  EXPECT_EQ(majority({{0, a}, {2, b}, {3, a}}), (std::vector{0, 3}));
  EXPECT_EQ(majority({{0, b}, {2, a}, {3, a}}), (std::vector{2, 3}));
  EXPECT_TRUE(majority({{0, a}, {1, b}}).empty());
}

// Ranks that train in lockstep, as State::step demands: a step's reduction needs all members, and nothing else comes
// between the reduction and `step`. A model depends on every step and on the world that made it.
class Schedule {
 public:
  explicit Schedule(std::uint64_t seed) : random_(seed) {
    for (int i = 0; i < pick(1, 5); ++i) ranks_.push_back({});
  }

  void run() {
    for (int change = 0; change < 8 && !ranks_.empty(); ++change) {
      enter();
      for (int step = pick(0, 3); step > 0; --step) whole_step();
      torn_step();
      for (int newcomers = pick(0, 2); newcomers > 0; --newcomers) ranks_.push_back({});
    }
  }

 private:
  struct Rank {
    std::int64_t steps = 0;
    bool fresh = true, whole = true;
    std::uint64_t model = 0;
  };

  int pick(int low, int high) { return std::uniform_int_distribution(low, high)(random_); }

  std::uint64_t next_model(const Rank& rank) const {
    return permutation::splitmix64(rank.model ^
                                   permutation::splitmix64(static_cast<std::uint64_t>(rank.steps) << 16 | world_));
  }

  void enter() {
    ++world_;
    std::vector<Standing> standings;
    for (const Rank& rank : ranks_)
      standings.push_back({.steps = rank.steps, .fresh = rank.fresh, .whole = rank.whole, .came_anew = rank.fresh});
    standings[0].reached = reached_;
    const bool nobody_knows = std::ranges::all_of(ranks_, &Rank::fresh);
    if (nobody_knows && reached_ >= 0 && ranks_[0].steps < reached_) {
      // All ranks that had the state are lost.
      const auto lost = agree_on_step(standings);
      ASSERT_FALSE(lost);
      ASSERT_EQ(lost.error().code(), ErrorCode::Unavailable);
      switch (pick(0, 2)) {
        case 0: ranks_.clear(); return;            // the job ends,
        case 1: reached_ = -1, ended_ = 0; break;  // is started again,
        default:                                   // or the program loads a checkpoint
          for (Rank& rank : ranks_) rank.steps = reached_ + pick(0, 2);
      }
      return enter();
    }
    const Agreement agreement = value_or_throw(agree_on_step(standings));
    std::int64_t furthest = nobody_knows ? ranks_[0].steps : 0;
    for (const Rank& rank : ranks_) furthest = std::max(furthest, rank.fresh ? 0 : rank.steps);
    ASSERT_GE(furthest + 1, ended_) << "more than one step is lost";
    ended_ = furthest;
    if (furthest > 0) reached_ = std::max(reached_, furthest);
    ASSERT_EQ(agreement.steps, furthest) << "a step that a rank had ended is lost";
    ASSERT_FALSE(agreement.sources.empty());
    const Rank source = ranks_[static_cast<std::size_t>(agreement.sources.front())];
    for (const int one : agreement.sources) {
      if (!agreement.begins) {
        ASSERT_EQ(ranks_[static_cast<std::size_t>(one)].model, source.model);
      }
    }
    // Some takers have received the state when others are lost; the next world then has both kinds.
    const bool lost_meanwhile = pick(0, 4) == 0;
    std::vector<Rank> left;
    for (Rank& rank : ranks_) {
      if (lost_meanwhile && pick(0, 2) == 0 && ranks_.size() > 1) continue;
      if (!lost_meanwhile || pick(0, 1) == 0) rank = {agreement.steps, false, true, source.model};
      left.push_back(rank);
    }
    if (lost_meanwhile) {
      ranks_ = std::move(left);
      if (!ranks_.empty()) enter();
    }
  }

  void mark(Rank& rank) {
    ++rank.steps;
    ended_ = std::max(ended_, rank.steps);
    if (&rank == ranks_.data()) reached_ = std::max(reached_, rank.steps);  // rank 0 reports its steps to the job
  }

  void whole_step() {
    for (Rank& rank : ranks_) {
      rank.model = next_model(rank);
      mark(rank);
    }
  }

  void torn_step() {
    // True if all ranks reached the reduction before some were lost. Then each rank may or may not have seen its end.
    const bool all_came = pick(0, 1) == 1;
    std::vector<Rank> left;
    for (Rank& rank : ranks_) {
      if (all_came && pick(0, 1) == 1) {
        const bool marked = pick(0, 3) != 0;  // else it is lost between optimizer.step and State::step
        rank.model = next_model(rank);
        if (!marked) continue;
        mark(rank);
      }
      if (pick(0, 3) != 0) left.push_back(rank);
    }
    ranks_ = std::move(left);
  }

  std::mt19937_64 random_;
  std::vector<Rank> ranks_;
  std::uint64_t world_ = 0;
  std::int64_t reached_ = -1;  ///< as recorded in the job's store
  std::int64_t ended_ = 0;     ///< the furthest step that any rank has ended
};

TEST(ElasticAgreement, NoEndedStepIsLostInRandomSchedules) {
  for (std::uint64_t seed = 0; seed < 100'000 && !testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Schedule(seed).run();
  }
}

}  // namespace
}  // namespace cohort::elastic
