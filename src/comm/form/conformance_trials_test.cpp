// Every collective against the plain reference, over worlds of threads, through a covering choice of types, operations,
// sizes, ranks, memory and forced plans. COHORT_TRIAL=NUMBER runs only that trial; COHORT_TEST_PIECE_BYTES=BYTES stages
// GPU memory through host memory in pieces of this size.
#include "base/testing/sanitized.h"
#include "comm/gpu/chunking.h"
#include "comm/testing/trials.h"
#include "comm/testing/worlds.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

TEST(Trials, CoverEveryPairAndEveryCollectiveBySizeAndPlan) {
  int impossible = 0;
  const std::vector<Trial> trials = make_trials(&impossible);
  EXPECT_GE(trials.size(), kCollectives.size() * kPlans.size() * kSizeClasses);
  // Counts pairs that cannot go together: (collective, op) and (collective, scaling) for collectives that do not
  // reduce, (type, op), (type, scaling), (op, scaling).
  int known = 0;
  for (const Kind kind : kCollectives) {
    if (!is_reduction(kind)) known += kReduceOpCount - 1 + kScalings - 1;
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

// Random programs on random worlds: collectives on the world, on the groups of a split and on a listed group, several
// in flight at a time, waited for in any order. Every result has to equal the reference's.

using namespace std::chrono_literals;

/// The communicators on which a step runs: the world, each group of the split, or the listed group.
enum class Where { World, Split, Listed };

/// The communicators of a program: their members, in their order of ranks.
struct Groups {
  std::vector<int> world;
  std::vector<std::vector<int>> of_split;
  std::vector<int> listed;

  std::vector<std::vector<int>> at(Where where) const {
    if (where == Where::World) return {world};
    if (where == Where::Split) return of_split;
    return {listed};
  }
};

struct Step {
  Where where = Where::World;
  /// The trial of each group.
  std::vector<Trial> trials;
  std::vector<std::vector<Prepared>> prepared;
};

Choice some_choice(std::mt19937_64& random, std::size_t ranks) {
  while (true) {
    Choice c;
    for (std::size_t p = 0; p < kParameters; ++p) {
      c[p] = static_cast<int>(random() % static_cast<std::uint64_t>(kValues[p]));
    }
    c[kRanks] = static_cast<int>(ranks) - 1;
    if (c[kSizeClass] >= kChunk && random() % 4 != 0) c[kSizeClass] = kPrime;
    if (!is_reduction(kCollectives[static_cast<std::size_t>(c[kCollective])])) c[kOp] = c[kScaling] = 0;
    if (possible(c)) return c;
  }
}

Step make_step(const Groups& groups, std::uint32_t seed) {
  std::mt19937_64 random(seed);
  Step step;
  step.where = static_cast<Where>(random() % 3);
  for (const std::vector<int>& members : groups.at(step.where)) {
    const OfGroup group(members, static_cast<int>(groups.world.size()));
    const Choice c = some_choice(random, members.size());
    Trial trial;
    trial.number = static_cast<int>(seed % 100000);
    trial.size = static_cast<int>(members.size());
    trial.place = static_cast<Place>(c[kPlace]);
    trial.in_place = c[kInPlace] == 1;
    const Call first = call_of(c, count_of(c, random), random);
    trial.calls.push_back(first);
    if (c[kCollective] >= kFirstGrouped) {
      trial.in_place = trial.in_place || first.kind == Kind::AllReduce;
      for (std::int64_t count : {std::int64_t{5}, first.count, std::int64_t{0}, std::int64_t{2001}}) {
        Call next = first;
        next.count = count;
        trial.calls.push_back(next);
      }
    }
    step.prepared.push_back(prepare(trial));
    step.trials.push_back(std::move(trial));
  }
  return step;
}

/// One rank's part: up to four steps under way, waited for in a random order.
std::string carry_out(Communicator world, const Groups& groups, const std::vector<Step>& steps,
                      const std::vector<int>& colors, std::uint64_t seed) {
  const int rank = world.rank();
  Communicator part = world.split({.color = colors[static_cast<std::size_t>(rank)]});
  Communicator listed = world.group(groups.listed);
  struct Running {
    const Step* step;
    std::size_t group;
    int own;
    std::vector<std::unique_ptr<CallMemory>> memories;
    Work work;
  };
  std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank));
  std::vector<Running> running;
  std::string wrong;
  const auto finish_one = [&] {
    const std::size_t which = random() % running.size();
    Running& one = running[which];
    one.work.wait();
    for (std::size_t i = 0; i < one.memories.size(); ++i) {
      const Bytes& expected = one.step->prepared[one.group][i].outputs[static_cast<std::size_t>(one.own)];
      const std::string decision = one.memories[i]->decision(expected);
      if (!decision.empty() && wrong.empty()) wrong = describe(one.step->trials[one.group]) + ": " + decision;
    }
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(which));
  };
  for (const Step& step : steps) {
    const auto all = groups.at(step.where);
    for (std::size_t g = 0; g < all.size(); ++g) {
      const auto found = std::find(all[g].begin(), all[g].end(), rank);
      if (found == all[g].end()) continue;
      Communicator& comm = step.where == Where::World ? world : step.where == Where::Split ? part : listed;
      Running one{&step, g, static_cast<int>(found - all[g].begin()), {}, {}};
      if (comm.rank() != one.own) return "the group numbers its ranks otherwise";
      const Trial& trial = step.trials[g];
      for (std::size_t i = 0; i < trial.calls.size(); ++i) {
        one.memories.push_back(
            std::make_unique<CallMemory>(comm, trial.calls[i], trial.place, trial.in_place,
                                         step.prepared[g][i].inputs[static_cast<std::size_t>(one.own)]));
      }
      one.work = start(comm, trial.calls, one.memories);
      running.push_back(std::move(one));
    }
    while (running.size() > 3) finish_one();
  }
  while (!running.empty()) finish_one();
  return wrong;
}

RC_GTEST_PROP(RandomPrograms, GiveWhatTheReferenceGives, ()) {
  const int size = *rc::gen::inRange(1, 7);
  const auto ranks = static_cast<std::size_t>(size);
  const auto colors = *rc::gen::container<std::vector<int>>(ranks, rc::gen::inRange(0, 3));
  auto order = std::vector<int>(ranks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(*rc::gen::arbitrary<std::uint32_t>()));
  order.resize(*rc::gen::inRange<std::size_t>(1, ranks + 1));
  const auto seeds =
      *rc::gen::resize(14, rc::gen::container<std::vector<std::uint32_t>>(rc::gen::arbitrary<std::uint32_t>()));
  const auto waiting = *rc::gen::arbitrary<std::uint32_t>();

  Groups groups;
  groups.listed = order;
  groups.world.resize(ranks);
  std::iota(groups.world.begin(), groups.world.end(), 0);
  for (int color = 0; color < 3; ++color) {
    std::vector<int> members;
    for (int rank = 0; rank < size; ++rank) {
      if (colors[static_cast<std::size_t>(rank)] == color) members.push_back(rank);
    }
    if (!members.empty()) groups.of_split.push_back(members);
  }
  std::vector<Step> steps;
  for (const std::uint32_t seed : seeds) steps.push_back(make_step(groups, seed));

  std::mutex mutex;
  std::string wrong;
  run_world(size,
            [&](Communicator comm) {
              const std::string own = carry_out(std::move(comm), groups, steps, colors, waiting);
              const std::lock_guard lock(mutex);
              if (wrong.empty()) wrong = own;
            },
            {.timeout = 30s});
  RC_ASSERT(wrong == "");
}

// The bits of a hundred thousand reductions are the same in each call, in any order of ranks, under every plan.

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

// The digests have to differ here, or equal digests elsewhere would prove nothing.
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
