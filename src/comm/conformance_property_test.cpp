// Random programs on random worlds: collectives on the world, on the groups of a split and on a listed group, several
// under way at a time, waited for in any order. Every result is the reference's.
#include "comm/testing/trials.h"
#include "comm/testing/worlds.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

/// Where a step takes place: everywhere, in each group of the split, or in the listed group.
enum class Where { World, Split, Listed };

/// The communicators of a program: who is in them, in their order of ranks.
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
  /// By group: what it does.
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
            {.timeout = 10s});
  RC_ASSERT(wrong == "");
}

}  // namespace
}  // namespace cohort::comm::testing
