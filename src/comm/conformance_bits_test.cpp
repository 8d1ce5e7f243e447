// The same bits, call after call: a hundred thousand reductions with ranks that come in any order, under every plan.
#include "base/sanitized.h"
#include "comm/testing/bits.h"
#include "comm/testing/trials.h"
#include "comm/testing/worlds.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

TEST(SameBits, OverAHundredThousandCallsInAnyOrderUnderEveryPlan) {
  constexpr int kSize = 3;
  constexpr int kCalls = 100000 / static_cast<int>(kPlans.size()) + 1;
  std::vector<std::uint64_t> first;
  for (std::size_t plan = 0; plan < kPlans.size(); ++plan) {
    const ForcedPlan forced(kPlans[plan]);
    std::vector<std::uint64_t> bits(kSize);
    run_world(kSize,
              [&](Communicator comm) { bits[static_cast<std::size_t>(comm.rank())] = bits_of(comm, kCalls, plan + 1); },
              {.timeout = 20s});
    EXPECT_EQ(bits[0], bits[1]) << "plan " << kPlans[plan];
    EXPECT_EQ(bits[0], bits[2]) << "plan " << kPlans[plan];
    if (plan == 0) first = bits;
    EXPECT_EQ(bits, first) << "plan " << kPlans[plan];
  }
}

// A digest that could not tell would prove nothing.
TEST(SameBits, AreNotThoseOfAnotherNumberOfRanks) {
  std::uint64_t of_two = 0;
  std::uint64_t of_three = 0;
  run_world(2, [&](Communicator comm) {
    const std::uint64_t bits = bits_of(comm, 20, 1);
    if (comm.rank() == 0) of_two = bits;
  });
  run_world(3, [&](Communicator comm) {
    const std::uint64_t bits = bits_of(comm, 20, 1);
    if (comm.rank() == 0) of_three = bits;
  });
  EXPECT_NE(of_two, of_three);
}

TEST(ManyRanks, OnThreadsDoEveryCollective) {
  constexpr int kSize = kAddressSanitizer || kThreadSanitizer ? 24 : 64;  // instrumented, 64 miss their deadlines
  std::mt19937_64 random(11);
  std::vector<Trial> trials;
  std::vector<std::vector<Prepared>> prepared;
  for (int collective = 0; collective < kValues[kCollective]; ++collective) {
    for (const std::int64_t count : {collective % 2 == 0 ? 3 : 700}) {
      Choice c;
      c.fill(0);
      c[kCollective] = collective;
      c[kDType] = static_cast<int>(DType::Float32);
      c[kRanks] = kSize - 1;
      Trial trial;
      trial.number = static_cast<int>(trials.size());
      trial.size = kSize;
      trial.place = static_cast<Place>(trial.number % kPlaceCount);
      trial.calls.push_back(call_of(c, count, random));
      if (collective >= kFirstGrouped) trial.calls.push_back(trial.calls[0]);
      prepared.push_back(prepare(trial));
      trials.push_back(std::move(trial));
    }
  }
  run_world(kSize,
            [&](Communicator comm) {
              for (std::size_t i = 0; i < trials.size(); ++i) EXPECT_EQ(run(comm, trials[i], prepared[i]), "");
            },
            {.timeout = 30s});
}

}  // namespace
}  // namespace cohort::comm::testing
