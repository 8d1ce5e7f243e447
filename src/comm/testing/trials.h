// For tests: which combinations of collective, type, operation, size, ranks, memory, plan and scaling are tried. Every
// triple of (collective, size class, plan) occurs, and every possible pair of values of two parameters. Seeded, so the
// trials are always the same; a failing trial is repeated by its number.
#pragma once

#include "comm/testing/calls.h"
#include "comm/testing/reference_fold.h"

#include <cohort/communicator.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::comm::testing {

inline constexpr std::array<const char*, 9> kPlans = {
    "",          "inline=0",          "cross=on",
    "cross=off", "zero-copy=off",     "stores=nt",
    "chunk=4K",  "inline=0,cross=on", "inline=0,cross=off,zero-copy=off,stores=nt,chunk=4K"};

struct Trial {
  int number = 0;
  int size = 1;
  int plan = 0;  ///< index in kPlans
  Place place = Place::Arena;
  bool in_place = false;
  bool large = false;       ///< takes long to prepare
  std::vector<Call> calls;  ///< more than one: grouped
};

inline std::string describe(const Trial& trial) {
  std::string text = fmt::format("trial {} ({} ranks, plan '{}', {} memory, {})", trial.number, trial.size,
                                 kPlans[static_cast<std::size_t>(trial.plan)], to_string(trial.place),
                                 trial.in_place ? "in place" : "out of place");
  for (const Call& call : trial.calls) text += " " + describe(call);
  return text;
}

/// A choice has one number for each of these parameters.
enum Parameter { kCollective, kSizeClass, kPlan, kDType, kOp, kRanks, kPlace, kInPlace, kScaling, kParameters };
enum SizeClass { kNone, kOne, kPrime, kTinyPayload, kInline, kPage, kChunk, kSeveralChunks, kMany, kSizeClasses };
enum Scaling { kPlain, kScaled, kWeighted, kEquallyWeighted, kScalings };
using Choice = std::array<int, kParameters>;
inline constexpr Choice kValues = {
    18, kSizeClasses, static_cast<int>(kPlans.size()), kDTypeCount, kReduceOpCount, 8, kPlaceCount, 2, kScalings};
inline constexpr std::array<Kind, 18> kCollectives = {
    Kind::AllReduce, Kind::Reduce,     Kind::ReduceScatter, Kind::ReduceScatterV, Kind::Broadcast,
    Kind::AllGather, Kind::AllGatherV, Kind::Gather,        Kind::Scatter,        Kind::AllToAll,
    Kind::AllToAllV, Kind::Barrier,    Kind::GatherV,       Kind::ScatterV,       Kind::AllReduce,
    Kind::Broadcast, Kind::AllGather,  Kind::ReduceScatter};  // the last four are grouped
inline constexpr int kFirstGrouped = 14;

inline bool possible(const Choice& c) {
  const Kind kind = kCollectives[static_cast<std::size_t>(c[kCollective])];
  const auto dtype = static_cast<DType>(c[kDType]);
  const auto op = static_cast<ReduceOp>(c[kOp]);
  if (!is_reduction(kind)) return op == ReduceOp::Sum && c[kScaling] == kPlain;
  if (!supports(dtype, op) || (c[kScaling] != kPlain && !is_scalable(dtype))) return false;
  const bool weighted = c[kScaling] == kWeighted || c[kScaling] == kEquallyWeighted;
  return !weighted || (op == ReduceOp::Average);
}

/// The pairs that are still to be covered, and the walk that covers them.
class Covering {
 public:
  Covering() {
    for (int a = 0; a < kParameters; ++a) {
      for (int b = a + 1; b < kParameters; ++b) {
        const auto at = static_cast<std::size_t>(a * kParameters + b);
        open_[at].assign(static_cast<std::size_t>(value_count(a) * value_count(b)), true);
      }
    }
  }

  std::vector<Choice> walk() {
    std::vector<Choice> chosen;
    for (int collective = 0; collective < kValues[kCollective]; ++collective) {
      for (int size = 0; size < kSizeClasses; ++size) {
        for (int plan = 0; plan < kValues[kPlan]; ++plan) {
          Choice fixed;
          fixed.fill(-1);
          fixed[kCollective] = collective;
          fixed[kSizeClass] = size;
          fixed[kPlan] = plan;
          add_best(fixed, 24, chosen);
        }
      }
    }
    for (int a = 0; a < kParameters; ++a) {
      for (int b = a + 1; b < kParameters; ++b) {
        for (int x = 0; x < value_count(a); ++x) {
          for (int y = 0; y < value_count(b); ++y) {
            if (!open(a, x, b, y)) continue;
            Choice fixed;
            fixed.fill(-1);
            fixed[static_cast<std::size_t>(a)] = x;
            fixed[static_cast<std::size_t>(b)] = y;
            if (!add_best(fixed, 2000, chosen)) ++impossible_;
          }
        }
      }
    }
    return chosen;
  }
  /// Number of pairs that thousands of attempts did not find, since they cannot go together.
  int impossible() const noexcept { return impossible_; }

 private:
  static int value_count(int parameter) { return kValues[static_cast<std::size_t>(parameter)]; }
  std::vector<bool>::reference open(int a, int x, int b, int y) {
    return open_[static_cast<std::size_t>(a * kParameters + b)][static_cast<std::size_t>(x * value_count(b) + y)];
  }
  template <class Visit>
  void each_pair(const Choice& c, const Visit& visit) {
    for (int a = 0; a < kParameters; ++a) {
      for (int b = a + 1; b < kParameters; ++b) {
        visit(open(a, c[static_cast<std::size_t>(a)], b, c[static_cast<std::size_t>(b)]));
      }
    }
  }
  /// Adds the possible completion of `fixed` that covers most.
  bool add_best(const Choice& fixed, int attempts, std::vector<Choice>& chosen) {
    Choice best{};
    int most = -1;
    int found = 0;
    for (int attempt = 0; attempt < 2000 && found < std::min(attempts, 24); ++attempt) {
      Choice c = fixed;
      for (std::size_t p = 0; p < kParameters; ++p) {
        if (c[p] < 0) c[p] = static_cast<int>(random_() % static_cast<std::uint64_t>(kValues[p]));
      }
      // Most collectives have no reduction to choose.
      if (!possible(c) && fixed[kOp] < 0) c[kOp] = 0;
      if (!possible(c) && fixed[kScaling] < 0) c[kScaling] = kPlain;
      if (!possible(c)) continue;
      ++found;
      int covers = 0;
      each_pair(c, [&](std::vector<bool>::reference pair) { covers += pair ? 1 : 0; });
      if (covers > most) {
        most = covers;
        best = c;
      }
    }
    if (most < 0) return false;
    each_pair(best, [](std::vector<bool>::reference pair) { pair = false; });
    chosen.push_back(best);
    return true;
  }

  std::mt19937_64 random_{20240229};
  std::array<std::vector<bool>, static_cast<std::size_t>(kParameters) * kParameters> open_;
  int impossible_ = 0;
};

/// Elements of a buffer of this size class, or of one of its parts.
inline std::int64_t count_of(const Choice& c, std::mt19937_64& random) {
  const auto element = static_cast<std::int64_t>(size_of(static_cast<DType>(c[kDType])));
  const std::int64_t ranks = c[kRanks] + 1;
  const std::int64_t nudge = static_cast<std::int64_t>(random() % 3) - 1;
  const bool of_parts = random() % 2 == 0;
  const auto part = [&](std::int64_t bytes) { return bytes / element / (of_parts ? ranks : 1) + nudge; };
  constexpr std::array<std::int64_t, 6> kPrimes = {2, 3, 7, 131, 1021, 4099};
  switch (c[kSizeClass]) {
    case kNone: return 0;
    case kOne: return 1;
    case kPrime: return kPrimes[random() % kPrimes.size()];
    case kTinyPayload: return std::max<std::int64_t>(part(48), 0);
    case kInline: return part(std::min<std::int64_t>(32768, 65536 / ranks));
    case kPage: return part(4096 * static_cast<std::int64_t>(1 + random() % 3));
    case kChunk: return (262144 / element) / ranks + nudge;
    case kSeveralChunks: return 600000 / element / ranks + 13;
    default: return 1100000 / element / ranks + nudge;
  }
}

inline Call call_of(const Choice& c, std::int64_t count, std::mt19937_64& random) {
  const int size = c[kRanks] + 1;
  const auto ranks = static_cast<std::size_t>(size);
  Call call;
  call.kind = kCollectives[static_cast<std::size_t>(c[kCollective])];
  call.dtype = static_cast<DType>(c[kDType]);
  call.op = static_cast<ReduceOp>(c[kOp]);
  call.count = count;
  // The size classes refer to whole buffers if there are no parts.
  if (c[kSizeClass] >= kChunk &&
      (call.kind == Kind::AllReduce || call.kind == Kind::Reduce || call.kind == Kind::Broadcast)) {
    call.count *= size;
  }
  if (has_root(call.kind)) call.root = static_cast<int>(random() % ranks);
  const auto uneven = [&] {
    switch (random() % 5) {
      case 0: return std::int64_t{0};
      case 1: return std::min<std::int64_t>(1, count);
      case 2: return count;
      case 3: return count + count / 2;
      default: return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(count + 1));
    }
  };
  const bool by_rank = has_counts_by_rank(call.kind);
  const std::size_t parts = by_rank ? ranks : call.kind == Kind::AllToAllV ? ranks * ranks : 0;
  for (std::size_t i = 0; i < parts; ++i) call.counts.push_back(uneven());
  if (c[kScaling] == kScaled) {
    call.prescale = 0.375;
    call.postscale = -1.0 / 3;
  } else if (c[kScaling] == kWeighted) {
    for (std::size_t i = 0; i < ranks; ++i) call.weights.push_back(static_cast<double>(random() % 5) * 1.25);
    if (random() % 2 == 0) call.postscale = 3;
  } else if (c[kScaling] == kEquallyWeighted) {
    call.weights.assign(ranks, 0.7);
    if (size > 2) call.weights[random() % ranks] = 0;
  }
  return call;
}

inline std::vector<Trial> make_trials(int* impossible = nullptr) {
  Covering covering;
  std::mt19937_64 random(7);
  std::vector<Trial> trials;
  for (const Choice& c : covering.walk()) {
    Trial trial;
    trial.number = static_cast<int>(trials.size());
    trial.size = c[kRanks] + 1;
    trial.plan = c[kPlan];
    trial.place = static_cast<Place>(c[kPlace]);
    trial.in_place = c[kInPlace] == 1;
    trial.large = c[kSizeClass] >= kChunk;
    trial.calls.push_back(call_of(c, count_of(c, random), random));
    if (c[kCollective] >= kFirstGrouped) {
      // Adds small calls of one kind, which may be fused, and calls with other types and sizes.
      for (std::uint64_t more = 1 + random() % 6; more > 0; --more) {
        Call next = trial.calls.front();
        const std::uint64_t kind = random() % 4;
        const auto dtype = static_cast<DType>(random() % kDTypeCount);
        const bool fits = !is_reduction(next.kind) || (supports(dtype, next.op) && is_scalable(dtype));
        if (kind == 0 && fits) next.dtype = dtype;
        if (kind != 3) next.count = static_cast<std::int64_t>(random() % (kind == 2 ? 3000 : 40));
        trial.calls.push_back(next);
      }
    }
    trials.push_back(std::move(trial));
  }
  if (impossible != nullptr) *impossible = covering.impossible();
  return trials;
}

/// Makes all ranks' inputs and results, before the ranks begin.
inline std::vector<Prepared> prepare(const Trial& trial) {
  std::vector<Prepared> made;
  for (const Call& call : trial.calls) {
    made.push_back(prepare(call, trial.size, static_cast<std::uint64_t>(trial.number) * 16 + made.size()));
  }
  return made;
}

/// Runs one rank's part of a trial. Returns "" if all was right.
inline std::string run(Communicator& comm, const Trial& trial, const std::vector<Prepared>& prepared) {
  const auto own = static_cast<std::size_t>(comm.rank());
  // Grouped reductions have only an in-place form.
  const Kind kind = trial.calls.front().kind;
  const bool grouped = trial.calls.size() > 1;
  const bool in_place = trial.in_place || (grouped && kind == Kind::AllReduce);
  std::vector<std::unique_ptr<CallMemory>> memories;
  for (std::size_t i = 0; i < trial.calls.size(); ++i) {
    memories.push_back(
        std::make_unique<CallMemory>(comm, trial.calls[i], trial.place, in_place, prepared[i].inputs[own]));
  }
  try {
    start(comm, trial.calls, memories).wait();
  } catch (const std::exception& error) {
    return describe(trial) + ": " + error.what();
  }
  for (std::size_t i = 0; i < trial.calls.size(); ++i) {
    std::string decision = memories[i]->decision(prepared[i].outputs[own]);
    if (!decision.empty()) return describe(trial) + ": " + decision;
  }
  return "";
}

// For tests: a long program of reductions with one digest of all results per rank. Worlds that use other paths, or
// whose ranks come in another order, have to give the same digests.

/// FNV-1a over words (Fowler, Noll, Vo).
inline std::uint64_t digest(std::uint64_t before, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<std::size_t>(8, bytes - i));
    before = (before ^ word) * 0x100000001B3ull;
  }
  return before;
}

/// Makes `calls` reductions with seeded types, sizes and memory; before each, this rank waits for a time that `jitter`
/// seeds. Returns the digest of all results of this rank.
inline std::uint64_t bits_of(Communicator& comm, int calls, std::uint64_t jitter) {
  constexpr std::array<DType, 5> kTypes = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64,
                                           DType::Complex64};
  constexpr std::array<ReduceOp, 3> kOps = {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product};
  constexpr std::int64_t kMost = 40000;
  constexpr std::size_t kMostBytes = kMost * 8;
  std::array<Bytes, kTypes.size()> inputs;
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    inputs[i] = interesting(kTypes[i], kMost, 77 + static_cast<std::uint64_t>(comm.rank()));
  }
  Memory arena = comm.allocate(kMostBytes);
  Bytes heap(kMostBytes);
  std::mt19937_64 program(5);  // the same on all ranks
  std::mt19937_64 delays(jitter * 1000 + static_cast<std::uint64_t>(comm.rank()));
  std::uint64_t result = 0xCBF29CE484222325ull;
  for (int call = 0; call < calls; ++call) {
    const std::size_t which = program() % kTypes.size();
    const DType dtype = kTypes[which];
    const ReduceOp op = kOps[program() % kOps.size()];
    const std::uint64_t size_class = program() % 400;
    const std::uint64_t most = size_class == 0 ? kMost : size_class < 20 ? 3000 : size_class < 120 ? 100 : 12;
    const auto count = static_cast<std::int64_t>(1 + program() % most);
    const auto begin = static_cast<std::int64_t>(program() % static_cast<std::uint64_t>(kMost - count + 1));
    const bool registered = program() % 2 == 0;
    const bool apart = program() % 4 == 0;
    const auto delay = delays() % 1024;
    if (delay < 200) std::this_thread::yield();
    if (delay == 1023) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const std::size_t element = size_of(dtype);
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    const std::byte* const from = inputs[which].data() + static_cast<std::size_t>(begin) * element;
    std::byte* const to = registered ? static_cast<std::byte*>(arena.data()) : heap.data();
    if (apart) {
      comm.all_reduce(ConstBuffer(from, count, dtype), Buffer(to, count, dtype), {.op = op}).wait();
    } else {
      std::memcpy(to, from, bytes);
      comm.all_reduce(Buffer(to, count, dtype), {.op = op}).wait();
    }
    result = digest(result, to, bytes);
  }
  return result;
}

}  // namespace cohort::comm::testing
