// Sums with the CPU's bits, step by step, without a GPU: all ranks' plans are carried out here, message by message,
// with little scratch memory, and compared with the reference. Covers one host, two, and unequal hosts; and weights.
#include "comm/gpu/exact_sums.h"
#include "comm/testing/reference_fold.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace cohort::comm::testing {
namespace {

using cuda::ExactFold;
using cuda::ExactStep;
using cuda::ExactSums;
using cuda::ExactWorld;

/// Messages between ranks, in order.
using Letters = std::map<std::pair<int, int>, std::deque<Bytes>>;

struct Rank {
  std::vector<Bytes> inputs, outputs;  // by request
  std::vector<Request> requests;
  std::vector<std::byte> scratch;
  std::vector<ExactStep> steps;
};

constexpr std::size_t kGuard = 64;

/// Carries out the NCCL operations of one step, and then its folds.
void carry_out(std::vector<Rank>& ranks, std::size_t number) {
  Letters letters;
  const auto step_of = [&](std::size_t rank) -> const ExactStep& { return ranks[rank].steps.at(number); };
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    ASSERT_LT(number, ranks[rank].steps.size());
    for (const ExactStep::Message& one : step_of(rank).sends)
      letters[{static_cast<int>(rank), one.peer}].emplace_back(one.memory, one.memory + one.bytes);
    ASSERT_EQ(step_of(rank).gathers.size(), step_of(0).gathers.size());
  }
  std::vector<std::vector<Bytes>> gathered(step_of(0).gathers.size());
  for (std::size_t g = 0; g < gathered.size(); ++g) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const ExactStep::Gather& one = step_of(rank).gathers[g];
      gathered[g].emplace_back(one.from, one.from + one.bytes);
      ASSERT_EQ(one.bytes, step_of(0).gathers[g].bytes);
    }
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t g = 0; g < gathered.size(); ++g) {
      std::byte* to = step_of(rank).gathers[g].to;
      for (const Bytes& each : gathered[g]) to = std::copy(each.begin(), each.end(), to);
    }
    for (const ExactStep::Message& one : step_of(rank).receives) {
      std::deque<Bytes>& queue = letters[{one.peer, static_cast<int>(rank)}];
      ASSERT_FALSE(queue.empty());
      ASSERT_EQ(queue.front().size(), one.bytes);
      std::copy(queue.front().begin(), queue.front().end(), one.memory);
      queue.pop_front();
    }
  }
  for (const auto& [way, queue] : letters) EXPECT_TRUE(queue.empty()) << way.first << " to " << way.second;
  for (const Rank& rank : ranks) {
    for (const ExactFold& one : rank.steps[number].folds) comm::fold(one.bound());
  }
}

struct Trial {
  Kind kind = Kind::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::int64_t count = 0;
  int root = 0;
  bool in_place = true;
  double prescale = 1, postscale = 1;
  std::vector<std::int64_t> counts = {};
};

Bytes folded(const Trial& trial, const std::vector<int>& hosts, const Round& round, const std::vector<Bytes>& inputs) {
  const auto scale = [&](std::size_t i) { return (round.fractions.empty() ? 1 : round.fractions[i]) * trial.prescale; };
  const bool scaled = !round.fractions.empty() || trial.prescale != 1;
  Factors last;
  last.divisor = round.fractions.empty() ? static_cast<std::int64_t>(round.contributors.size()) : 1;
  last.postscale = trial.postscale;
  std::vector<Bytes> partials;
  for (int host = 0; host <= (hosts.empty() ? 0 : *std::max_element(hosts.begin(), hosts.end())); ++host) {
    Factors own;
    std::vector<Bytes> here;
    for (std::size_t i = 0; i < round.contributors.size(); ++i) {
      const auto rank = static_cast<std::size_t>(round.contributors[i]);
      if (!hosts.empty() && hosts[rank] != host) continue;
      here.push_back(inputs[rank]);
      if (scaled) own.scales.push_back(scale(i));
    }
    if (hosts.empty()) {
      last.scales = own.scales;
      return reference_fold(trial.dtype, trial.op, here, trial.count, last);
    }
    const ReduceOp within = trial.op == ReduceOp::Average ? ReduceOp::Sum : trial.op;
    if (!here.empty()) partials.push_back(reference_fold(trial.dtype, within, here, trial.count, own));
  }
  return reference_fold(trial.dtype, trial.op, partials, trial.count, last);
}

void run(const std::vector<Trial>& trials, int size, const std::vector<int>& hosts, const Round& round,
         std::size_t most) {
  const auto all = static_cast<std::size_t>(size);
  std::vector<Rank> ranks(all);
  std::vector<std::unique_ptr<ExactWorld>> worlds;
  for (std::size_t r = 0; r < all; ++r) {
    const int own = static_cast<int>(r);
    Rank& rank = ranks[r];
    for (std::size_t i = 0; i < trials.size(); ++i) {
      const Trial& trial = trials[i];
      rank.inputs.push_back(interesting(trial.dtype, trial.count, 31 * i + r));
      rank.outputs.emplace_back(rank.inputs.back().size());
    }
    for (std::size_t i = 0; i < trials.size(); ++i) {
      const Trial& trial = trials[i];
      Request request;
      request.kind = trial.kind;
      request.dtype = trial.dtype;
      request.op = trial.op;
      request.root = trial.root;
      request.prescale = trial.prescale;
      request.postscale = trial.postscale;
      request.input_count = trial.count;
      const bool keeps = trial.kind != Kind::Reduce || trial.root == own;
      request.input = rank.inputs[i].data();
      request.output_count = keeps ? trial.count : 0;
      request.output = !keeps ? nullptr : trial.in_place ? rank.inputs[i].data() : rank.outputs[i].data();
      if (trial.kind == Kind::ReduceScatter) request.output_count = trial.count / size;
      if (trial.kind == Kind::ReduceScatterV) {
        request.counts = std::make_shared<const Counts>(Counts{trial.counts, {}});
        request.output_count = trial.counts[r];
      }
      if (trial.in_place && (trial.kind == Kind::ReduceScatter || trial.kind == Kind::ReduceScatterV)) {
        request.output =
            rank.inputs[i].data() + static_cast<std::size_t>(kept_by(request, own).begin) * size_of(trial.dtype);
      }
      rank.requests.push_back(std::move(request));
    }
  }
  std::vector<std::vector<Bytes>> brought(trials.size());
  for (std::size_t i = 0; i < trials.size(); ++i) {
    for (const Rank& rank : ranks) brought[i].push_back(rank.inputs[i]);
  }
  for (std::size_t r = 0; r < all; ++r) {
    Rank& rank = ranks[r];
    worlds.push_back(std::make_unique<ExactWorld>(static_cast<int>(r), size, hosts));
    const std::size_t bytes = ExactSums::scratch_of(rank.requests, *worlds.back(), most);
    EXPECT_LE(bytes, 2 * most);
    rank.scratch.assign(bytes + kGuard, std::byte{0x5A});
    rank.steps = ExactSums(*worlds.back(), round, most).plan(rank.requests, rank.scratch.data());
    ASSERT_EQ(rank.steps.size(), ranks[0].steps.size());
  }
  for (std::size_t number = 0; number < ranks[0].steps.size(); ++number) {
    ASSERT_NO_FATAL_FAILURE(carry_out(ranks, number)) << "step " << number;
  }
  for (std::size_t r = 0; r < all; ++r) {
    const Rank& rank = ranks[r];
    EXPECT_EQ(Bytes(rank.scratch.end() - kGuard, rank.scratch.end()), Bytes(kGuard, std::byte{0x5A}));
    for (std::size_t i = 0; i < trials.size(); ++i) {
      const Bytes right = folded(trials[i], hosts, round, brought[i]);
      const Request& request = rank.requests[i];
      const bool parts = trials[i].kind == Kind::ReduceScatter || trials[i].kind == Kind::ReduceScatterV;
      const std::size_t begin =
          parts ? static_cast<std::size_t>(kept_by(request, static_cast<int>(r)).begin) * size_of(request.dtype) : 0;
      const auto* const result = static_cast<const std::byte*>(request.output);
      EXPECT_TRUE(std::equal(result, result + request.output_bytes(), right.data() + begin))
          << fmt::format("rank {} of {}, {} hosts, trial {}: {} {} [{}]", r, size, hosts.empty() ? 1 : hosts.back() + 1,
                         i, to_string(request.dtype), to_string(request.op), request.input_count);
    }
  }
}

Round round_of_all(int size) {
  Round round;
  round.everyone = true;
  for (int rank = 0; rank < size; ++rank) round.contributors.push_back(rank);
  return round;
}

std::vector<Trial> some_trials(int size, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Trial> trials;
  for (const Kind kind : {Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::ReduceScatterV}) {
    for (int turn = 0; turn < 4; ++turn) {
      Trial trial;
      trial.kind = kind;
      do {
        trial.dtype = static_cast<DType>(random() % kDTypeCount);
        trial.op = static_cast<ReduceOp>(random() % kReduceOpCount);
      } while (!supports(trial.dtype, trial.op));
      trial.count = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(count));
      trial.root = static_cast<int>(random() % static_cast<std::uint64_t>(size));
      trial.in_place = random() % 2 == 0;
      if (is_scalable(trial.dtype) && turn == 0) trial.prescale = 0.3;
      if (is_scalable(trial.dtype) && turn < 2) trial.postscale = -7;
      if (kind == Kind::ReduceScatter) trial.count *= size;
      if (kind == Kind::ReduceScatterV) {
        std::int64_t sum = 0;
        for (int rank = 0; rank < size; ++rank) {
          trial.counts.push_back(random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 1000));
          sum += trial.counts.back();
        }
        trial.count = sum;
      }
      trials.push_back(std::move(trial));
    }
  }
  return trials;
}

TEST(ExactSums, HaveTheReferencesBitsInAnyNumberOfSteps) {
  const std::vector<std::vector<int>> layouts[] = {{{}, {0, 1}},
                                                   {{}, {0, 1, 1}},
                                                   {{}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2, 2}},
                                                   {},
                                                   {{0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1, 1}}};
  for (int size = 2; size <= 6; ++size) {
    for (const std::vector<int>& hosts : layouts[size - 2]) {
      for (const std::size_t most : {std::size_t{4096}, std::size_t{1} << 16, ExactSums::kMostAtOnce}) {
        // Inputs larger than 64 KiB are cut into slices, which take many steps, some, or one.
        const std::int64_t count = 24000;
        if (most == 4096) {
          std::vector<Trial> trials;
          for (Trial& trial : some_trials(size, count, 77))
            if (static_cast<std::size_t>(trial.count) * size_of(trial.dtype) > (std::size_t{64} << 10))
              trials.push_back(std::move(trial));
          run(trials, size, hosts, round_of_all(size), most);
        } else {
          run(some_trials(size, count, most), size, hosts, round_of_all(size), most * 8);
        }
      }
    }
  }
}

TEST(ExactSums, LeaveOutRanksWithoutWeight) {
  const std::vector<std::vector<int>> layouts = {{}, {0, 0, 1, 1}, {0, 1, 2, 3}};
  for (const std::vector<int>& hosts : layouts) {
    std::vector<Round> rounds(4);
    rounds[0].contributors = {1, 2};
    rounds[1].contributors = {0, 1, 3};
    rounds[1].fractions = {0.5, 0.125, 0.375};
    rounds[2].contributors = {3};
    for (const Round& round : rounds) {
      for (const DType dtype : {DType::Float16, DType::Float32, DType::Complex128}) {
        for (const std::int64_t count : {1000, 50000}) {
          for (const Kind kind : {Kind::AllReduce, Kind::Reduce}) {
            const Trial trial{.kind = kind, .dtype = dtype, .op = ReduceOp::Average, .count = count, .root = 2};
            run({trial}, 4, hosts, round, std::size_t{1} << 20);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cohort::comm::testing
