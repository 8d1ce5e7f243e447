// Every collective against the plain reference, over worlds of threads, through a covering choice of types, operations,
// sizes, ranks, memory and forced plans. COHORT_TRIAL=NUMBER runs one trial alone; COHORT_TEST_PIECE_BYTES=BYTES has a
// GPU's memory go through the host's in pieces of so many.
#include "comm/cuda/chunking.h"
#include "comm/testing/trials.h"
#include "comm/testing/worlds.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

TEST(Trials, CoverEveryPairAndEveryCollectiveBySizeAndPlan) {
  int impossible = 0;
  const std::vector<Trial> trials = make_trials(&impossible);
  EXPECT_GE(trials.size(), kCollectives.size() * kPlans.size() * kSizeClasses);
  // Those that cannot go together: (collective, op) of what does not reduce, (collective, scaling), (type, op), (type,
  // scaling), (op, scaling).
  int known = 0;
  for (const Kind kind : kCollectives) {
    const bool weighs = kind == Kind::AllReduce || kind == Kind::Reduce;
    if (!is_reduction(kind)) known += kReduceOpCount - 1 + kScalings - 1;
    if (is_reduction(kind) && !weighs) known += 2;
  }
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (!is_scalable(dtype)) known += kScalings - 1;
    for (int op = 0; op < kReduceOpCount; ++op) known += supports(dtype, static_cast<ReduceOp>(op)) ? 0 : 1;
  }
  for (int op = 0; op < kReduceOpCount; ++op) {
    const auto which = static_cast<ReduceOp>(op);
    if (which != ReduceOp::Average) known += 2;
    if (which == ReduceOp::BitAnd || which == ReduceOp::BitOr || which == ReduceOp::BitXor) ++known;
  }
  EXPECT_EQ(impossible, known);
}

class OnThreads : public ::testing::TestWithParam<int> {};

TEST_P(OnThreads, EveryTrialGivesTheReferencesBits) {
  const int size = GetParam();
  const char* const only = std::getenv("COHORT_TRIAL");
  if (const char* const bytes = std::getenv("COHORT_TEST_PIECE_BYTES"))
    cuda::set_piece_bytes(std::strtoull(bytes, nullptr, 10));
  std::vector<std::vector<Trial>> by_plan(kPlans.size());
  std::vector<std::vector<std::vector<Prepared>>> prepared(kPlans.size());
  for (Trial& trial : make_trials()) {
    if (trial.size != size || (only != nullptr && std::to_string(trial.number) != only)) continue;
    const auto plan = static_cast<std::size_t>(trial.plan);
    prepared[plan].push_back(prepare(trial));
    by_plan[plan].push_back(std::move(trial));
  }
  std::mutex mutex;
  std::vector<std::string> wrong;
  std::size_t ran = 0;
  for (std::size_t plan = 0; plan < kPlans.size(); ++plan) {
    const ForcedPlan forced(kPlans[plan]);
    const auto body = [&](Communicator comm) {
      for (std::size_t i = 0; i < by_plan[plan].size(); ++i) {
        const std::string decision = run(comm, by_plan[plan][i], prepared[plan][i]);
        if (decision.empty()) continue;
        const std::lock_guard lock(mutex);
        wrong.push_back(decision);
      }
      comm.barrier().wait();
    };
    ASSERT_NO_THROW(run_world(size, body, {.timeout = 20s})) << "plan " << kPlans[plan];
    ran += by_plan[plan].size();
  }
  for (std::size_t i = 0; i < wrong.size() && i < 10; ++i) ADD_FAILURE() << wrong[i];
  EXPECT_EQ(wrong.size(), 0u);
  EXPECT_GT(ran, only == nullptr ? 50u : 0u);
  RecordProperty("trials", static_cast<int>(ran));
}

INSTANTIATE_TEST_SUITE_P(Ranks, OnThreads, ::testing::Range(1, 9));

}  // namespace
}  // namespace cohort::comm::testing
