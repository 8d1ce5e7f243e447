#include <cohort/early_stopping.h>

#include "train/checkpoint/testing.h"

#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

namespace cohort::checkpoint {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinite = std::numeric_limits<double>::infinity();

/// Returns the number of values after which `should_stop` returned true; 0: it never did.
std::size_t asked(EarlyStopping& early, const std::vector<double>& values, Communicator comm = {}) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (early.should_stop(comm, values[i])) return i + 1;
  }
  return 0;
}

TEST(EarlyStopping, EndsAfterSoManyValuesWithoutImprovement) {
  EarlyStopping one({.patience = 1});
  EXPECT_EQ(asked(one, {3, 2, 2}), 3u) << "an equal value is no improvement";
  EarlyStopping delta({.patience = 2, .min_delta = 0.5});
  EXPECT_EQ(asked(delta, {3, 2.5, 2.4, 2}), 0u) << "2.4 is an improvement on 3; 2.5 was none";
  EXPECT_EQ(delta.best(), 2.4);
  EXPECT_EQ(asked(delta, {1.95}), 1u);
  EarlyStopping highest({.patience = 2, .mode = BestMode::Max});
  EXPECT_EQ(asked(highest, {0.5, 0.6, 0.55, 0.7, 0.7, kInfinite}), 6u);
  EXPECT_EQ(highest.best(), 0.7);
  EarlyStopping nan({.patience = 3});
  EXPECT_EQ(asked(nan, {kNan, kNan, 7, kNan, -kInfinite, kNan}), 6u);
  EXPECT_EQ(nan.best(), 7);
  EXPECT_FALSE(nan.improved());
  for (const EarlyStoppingOptions& wrong :
       {EarlyStoppingOptions{.patience = 0}, {.min_delta = -1}, {.min_delta = kNan}, {.min_delta = kInfinite}})
    EXPECT_EQ(code_of([&] { EarlyStopping{wrong}; }, "at least"), ErrorCode::InvalidArgument);
}

TEST(EarlyStopping, AllRanksEndInTheStepOfRankZero) {
  std::mutex mutex;
  std::vector<std::size_t> ends;
  run_on_threads(3, [&](Communicator comm) {
    // The other ranks have other values; rank 2 has other options, rank 1 another state.
    EarlyStopping early({.patience = comm.rank() == 2 ? 1 : 3});
    if (comm.rank() == 1) early.load_state("mode=min best=-1 waited=2");
    const double mine = comm.rank() == 0 ? 1 : kNan;
    const std::size_t end = asked(early, {mine, mine, mine / 2, mine, mine, mine}, comm);
    EXPECT_EQ(early.best(), 0.5);
    const std::lock_guard<std::mutex> lock(mutex);
    ends.push_back(end);
  });
  EXPECT_EQ(ends, std::vector<std::size_t>(3, 6));
}

TEST(EarlyStopping, GoesOnFromItsState) {
  for (const double best : {0.1, 1e-300, -0.0, 3.0}) {
    EarlyStopping early;
    asked(early, {best, best + 1});
    EarlyStopping later;
    later.load_state(early.state());
    EXPECT_EQ(later.best(), best);
    EXPECT_EQ(later.waited(), 1);
    EXPECT_EQ(asked(later, {best + 1, best}), 2u);
  }
  EarlyStopping fresh;
  EarlyStopping other;
  other.load_state(fresh.state());
  EXPECT_TRUE(std::isnan(other.best()));
  for (const char* const wrong :
       {"", "mode=min best=", "mode=min best=1", "mode=min best=1 waited=", "mode=min best=1 waited=-1",
        "mode=min best=1 waited=1 ", "mode=min best=1.0 waited=1", "mode=min best=x waited=1",
        "mode=min best=1 waited=1x", "mode=min best=1 waited=9223372036854775807", "mode=min worst=1 waited=1",
        "best=1 waited=1", "mode=least best=1 waited=1"}) {
    EXPECT_EQ(code_of([&] { fresh.load_state(wrong); }, "is not a state"), ErrorCode::InvalidArgument) << wrong;
  }
  EarlyStopping highest({.mode = BestMode::Max});
  EXPECT_EQ(code_of([&] { highest.load_state("mode=min best=2 waited=1"); }, "of another mode"),
            ErrorCode::InvalidArgument);
  EXPECT_TRUE(std::isnan(highest.best()));
}

}  // namespace
}  // namespace cohort::checkpoint
