// The conformance trials with ranks that are processes: what they read of each other goes through mapped segments and
// the kernel here, not through one address space.
#include "comm_processes.h"

#include "comm/testing/trials.h"
#include "comm/testing/worlds.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::testing {
namespace {

using comm::testing::ForcedPlan;
using comm::testing::kPlans;
using comm::testing::Prepared;
using comm::testing::Trial;

/// May this process be read by its siblings? Then so may the ranks.
bool cross_allowed() {
  Processes world(2);
  const ForcedPlan forced("cross=on");
  world.start([](Communicator) -> std::string { return "formed"; });
  return world.collect(0).said == "formed";
}

class OnProcesses : public ::testing::TestWithParam<int> {};

TEST_P(OnProcesses, TrialsGiveTheReferencesBits) {
  const int size = GetParam();
  const bool cross = cross_allowed();
  std::size_t ran = 0;
  for (std::size_t plan = 0; plan < kPlans.size(); ++plan) {
    if (!cross && std::string_view(kPlans[plan]).find("cross=on") != std::string_view::npos) continue;
    std::vector<Trial> trials;
    std::vector<std::vector<Prepared>> prepared;
    for (Trial& trial : comm::testing::make_trials()) {
      if (trial.size != size || static_cast<std::size_t>(trial.plan) != plan) continue;
      prepared.push_back(comm::testing::prepare(trial));
      trials.push_back(std::move(trial));
    }
    const ForcedPlan forced(kPlans[plan]);
    Processes world(size);
    world.start([&](Communicator comm) -> std::string {
      for (std::size_t i = 0; i < trials.size(); ++i) {
        const std::string verdict = comm::testing::run(comm, trials[i], prepared[i]);
        if (!verdict.empty()) return verdict;
      }
      comm.barrier().wait();
      return "right";
    });
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(world.collect(rank).said, "right") << kPlans[plan];
    ran += trials.size();
  }
  EXPECT_GT(ran, 50u);
  if (!cross) GTEST_SKIP() << "ranks may not read each other's memory here: plans with cross=on were not tried";
}

INSTANTIATE_TEST_SUITE_P(Ranks, OnProcesses, ::testing::Values(2, 3, 4));

TEST(SameBits, OnProcessesAsOnThreads) {
  constexpr int kCalls = 3000;
  Processes threads(1);
  threads.start_rank(0, [] {
    std::uint64_t bits = 0;
    comm::testing::run_world(3, [&](Communicator comm) {
      const std::uint64_t own = comm::testing::bits_of(comm, kCalls, 1);
      if (comm.rank() == 0) bits = own;
    });
    return std::to_string(bits);
  });
  const std::string expected = threads.collect(0).said;
  EXPECT_GT(expected.size(), 5u) << expected;
  Processes processes(3);
  processes.start([](Communicator comm) { return std::to_string(comm::testing::bits_of(comm, kCalls, 2)); });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.collect(rank).said, expected);
}

TEST(SixtyFourRanks, OnProcessesDoEveryCollective) {
  using namespace comm::testing;
  constexpr int kSize = 64;
  std::mt19937_64 random(12);
  std::vector<Trial> trials;
  std::vector<std::vector<Prepared>> prepared;
  for (int collective = 0; collective < kValues[kCollective]; ++collective) {
    Choice c;
    c.fill(0);
    c[kCollective] = collective;
    c[kDType] = static_cast<int>(DType::Int32);
    c[kRanks] = kSize - 1;
    Trial trial;
    trial.number = collective;
    trial.size = kSize;
    trial.place = static_cast<Place>(collective % kPlaceCount);
    trial.calls.push_back(call_of(c, collective % 2 == 0 ? 300 : 2, random));
    if (collective >= kFirstGrouped) trial.calls.push_back(trial.calls[0]);
    prepared.push_back(prepare(trial));
    trials.push_back(std::move(trial));
  }
  Processes world(kSize);
  world.start([&](Communicator comm) -> std::string {
    for (std::size_t i = 0; i < trials.size(); ++i) {
      const std::string verdict = run(comm, trials[i], prepared[i]);
      if (!verdict.empty()) return verdict;
    }
    comm.barrier().wait();
    return "right";
  });
  for (int rank = 0; rank < kSize; ++rank) EXPECT_EQ(world.collect(rank).said, "right");
}

}  // namespace
}  // namespace cohort::testing
