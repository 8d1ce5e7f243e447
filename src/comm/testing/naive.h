// For tests: the reduction of a world on several (fake) hosts: each host's ranks are folded first, then the hosts.
// Pure, except that COHORT_PRETEND_HOSTS says where the ranks are.
#pragma once

#include "comm/api/request.h"
#include "comm/testing/reference_fold.h"
#include "comm/testing/worlds.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace cohort::comm::testing {

/// While it lives, references are for a group with these members of a world. Its hosts are numbered in the order in
/// which its ranks name them. One thread.
class OfGroup {
 public:
  OfGroup(const std::vector<int>& members, int world) {
    const std::vector<int> hosts = Worlds::chosen().hosts(world);
    std::vector<int> known;
    for (const int member : members) {
      if (hosts.empty()) break;
      const int host = hosts[static_cast<std::size_t>(member)];
      const auto found = std::find(known.begin(), known.end(), host);
      hosts_.push_back(static_cast<int>(found - known.begin()));
      if (found == known.end()) known.push_back(host);
    }
    current() = this;
  }
  ~OfGroup() { current() = nullptr; }
  OfGroup(const OfGroup&) = delete;
  OfGroup& operator=(const OfGroup&) = delete;

  /// Hosts of the ranks of a world or group of size `size`.
  static std::vector<int> hosts(int size) {
    return current() != nullptr ? current()->hosts_ : Worlds::chosen().hosts(size);
  }

 private:
  static const OfGroup*& current() {
    thread_local const OfGroup* group = nullptr;
    return group;
  }
  std::vector<int> hosts_;
};

/// The fold over hosts, of which some may bring nothing: block by block of 16, then over the blocks.
inline Bytes reference_of_hosts(DType dtype, ReduceOp op, std::vector<std::pair<int, Bytes>> partials, int hosts,
                                std::int64_t count, const Factors& factors) {
  for (; hosts > 16; hosts = (hosts + 15) / 16) {
    std::vector<std::pair<int, Bytes>> blocks;
    for (std::size_t first = 0, last = 0; first < partials.size(); first = last) {
      std::vector<Bytes> members;
      const int block = partials[first].first / 16;
      for (; last < partials.size() && partials[last].first / 16 == block; ++last)
        members.push_back(partials[last].second);
      Factors of_block;
      of_block.order = factors.order;
      blocks.emplace_back(
          block, reference_fold(dtype, op == ReduceOp::Average ? ReduceOp::Sum : op, members, count, of_block));
    }
    partials = std::move(blocks);
  }
  std::vector<Bytes> all;
  for (auto& [number, bytes] : partials) all.push_back(std::move(bytes));
  if (all.empty()) return Bytes(static_cast<std::size_t>(count) * size_of(dtype));
  return reference_fold(dtype, op, all, count, factors);
}

/// `ranks[i]`, in a world of size `size`, has `inputs[i]`.
inline Bytes reference_by_hosts(DType dtype, ReduceOp op, const std::vector<int>& ranks, int size,
                                const std::vector<Bytes>& inputs, std::int64_t count, const Factors& factors = {}) {
  const std::vector<int> hosts = OfGroup::hosts(size);
  const int last_host = hosts.empty() ? 0 : *std::max_element(hosts.begin(), hosts.end());
  if (last_host == 0) return reference_fold(dtype, op, inputs, count, factors);
  std::vector<std::pair<int, Bytes>> partials;  // by host
  for (int host = 0; host <= last_host; ++host) {
    std::vector<Bytes> here;
    Factors own;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (hosts[static_cast<std::size_t>(ranks[i])] != host) continue;
      here.push_back(inputs[i]);
      if (!factors.scales.empty()) own.scales.push_back(factors.scales[i]);
    }
    if (here.empty()) continue;
    partials.emplace_back(host, reference_fold(dtype, op == ReduceOp::Average ? ReduceOp::Sum : op, here, count, own));
  }
  Factors last;
  last.order = order_over(last_host + 1);
  last.divisor = factors.divisor != 0 ? factors.divisor : static_cast<std::int64_t>(ranks.size());
  last.postscale = factors.postscale;
  return reference_of_hosts(dtype, op, std::move(partials), last_host + 1, count, last);
}

// For tests: what every collective has to do, written as plainly as possible: it takes all ranks' inputs and returns
// all ranks' outputs. Pure; uses nothing of the engine or its kernels.

/// A collective as all ranks call it.
struct Call {
  Kind kind = Kind::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::int64_t count = 0;  ///< elements of one part if parts are equal, else of the buffer
  int root = 0;
  std::vector<double> weights = {};  ///< by rank; empty: not weighted
  double prescale = 1;
  double postscale = 1;
  /// Counts, for variants that have them, by rank; for all_to_all_v, from each rank to each, row by row.
  std::vector<std::int64_t> counts = {};
};

inline bool has_root(Kind kind) {
  return kind == Kind::Reduce || kind == Kind::Broadcast || kind == Kind::Gather || kind == Kind::GatherV ||
         kind == Kind::Scatter || kind == Kind::ScatterV;
}

/// True if `counts` has one entry for each rank.
inline bool has_counts_by_rank(Kind kind) {
  return kind == Kind::ReduceScatterV || kind == Kind::AllGatherV || kind == Kind::GatherV || kind == Kind::ScatterV;
}

inline std::string describe(const Call& call) {
  std::string text = fmt::format("{}({}[{}]", name_of(call.kind), to_string(call.dtype), call.count);
  if (is_reduction(call.kind)) text += fmt::format(", {}", to_string(call.op));
  if (has_root(call.kind)) text += fmt::format(", root {}", call.root);
  if (!call.weights.empty()) text += fmt::format(", weights [{}]", fmt::join(call.weights, " "));
  if (call.prescale != 1 || call.postscale != 1) text += fmt::format(", x{} x{}", call.prescale, call.postscale);
  if (!call.counts.empty()) text += fmt::format(", counts [{}]", fmt::join(call.counts, " "));
  return text + ")";
}

inline std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += count;
  return sum;
}

/// Number of elements that rank `from` sends to rank `to` in an all_to_all_v.
inline std::int64_t sent(const Call& call, int size, int from, int to) {
  return call.counts[static_cast<std::size_t>(from * size + to)];
}

/// Number of elements of rank `rank`'s input.
inline std::int64_t elements_in(const Call& call, int size, int rank) {
  switch (call.kind) {
    case Kind::Barrier: return 0;
    case Kind::ReduceScatter:
    case Kind::AllToAll: return call.count * size;
    case Kind::Scatter: return rank == call.root ? call.count * size : 0;
    case Kind::ReduceScatterV: return sum_of(call.counts);
    case Kind::ScatterV: return rank == call.root ? sum_of(call.counts) : 0;
    case Kind::AllGatherV:
    case Kind::GatherV: return call.counts[static_cast<std::size_t>(rank)];
    case Kind::AllToAllV: {
      std::int64_t sum = 0;
      for (int to = 0; to < size; ++to) sum += sent(call, size, rank, to);
      return sum;
    }
    default: return call.count;
  }
}

/// Number of elements that the rank receives.
inline std::int64_t elements_out(const Call& call, int size, int rank) {
  switch (call.kind) {
    case Kind::Barrier: return 0;
    case Kind::AllGather:
    case Kind::AllToAll: return call.count * size;
    case Kind::Reduce: return rank == call.root ? call.count : 0;
    case Kind::Gather: return rank == call.root ? call.count * size : 0;
    case Kind::AllGatherV: return sum_of(call.counts);
    case Kind::GatherV: return rank == call.root ? sum_of(call.counts) : 0;
    case Kind::ReduceScatterV:
    case Kind::ScatterV: return call.counts[static_cast<std::size_t>(rank)];
    case Kind::AllToAllV: {
      std::int64_t sum = 0;
      for (int from = 0; from < size; ++from) sum += sent(call, size, from, rank);
      return sum;
    }
    default: return call.count;
  }
}

/// Positions of the input and the output in one buffer when a call is in place, in elements from its beginning.
struct InPlace {
  std::int64_t input = 0;
  std::int64_t output = 0;
};
inline InPlace in_place(const Call& call, int rank) {
  std::int64_t before = call.count * rank;
  if (has_counts_by_rank(call.kind)) {
    before = 0;
    for (int lower = 0; lower < rank; ++lower) before += call.counts[static_cast<std::size_t>(lower)];
  }
  switch (call.kind) {
    case Kind::AllGather:
    case Kind::AllGatherV: return {before, 0};
    case Kind::Gather:
    case Kind::GatherV: return {rank == call.root ? before : 0, 0};
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV: return {0, before};
    case Kind::Scatter:
    case Kind::ScatterV: return {0, rank == call.root ? before : 0};
    default: return {};
  }
}

/// Returns the reduction of all ranks' inputs.
inline Bytes naive_reduction(const Call& call, const std::vector<Bytes>& inputs) {
  const std::size_t ranks = inputs.size();
  const auto count = static_cast<std::int64_t>(inputs[0].size() / size_of(call.dtype));
  std::vector<Bytes> folded;
  std::vector<int> members;
  Factors factors;
  if (call.weights.empty()) {
    folded = inputs;
    for (std::size_t rank = 0; rank < ranks; ++rank) members.push_back(static_cast<int>(rank));
  } else {
    // Ranks of weight 0 do not take part. Equal weights are the plain average; else each x is multiplied by its share,
    // which is computed from weights relative to the largest.
    std::vector<double> taken;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (call.weights[rank] == 0) continue;
      folded.push_back(inputs[rank]);
      members.push_back(static_cast<int>(rank));
      taken.push_back(call.weights[rank]);
    }
    if (taken.empty()) return Bytes(inputs[0].size(), std::byte{0});
    const double largest = *std::max_element(taken.begin(), taken.end());
    if (*std::min_element(taken.begin(), taken.end()) != largest) {
      double total = 0;
      for (const double weight : taken) total += weight / largest;
      for (const double weight : taken) factors.scales.push_back(weight / largest / total);
      factors.divisor = 1;
    }
  }
  if (call.prescale != 1) {
    factors.scales.resize(folded.size(), 1);
    for (double& scale : factors.scales) scale *= call.prescale;
  }
  factors.postscale = call.postscale;
  if (ranks == 1 && call.prescale == 1 && call.postscale == 1) return inputs[0];  // not even a NaN is touched
  return reference_by_hosts(call.dtype, call.op, members, static_cast<int>(ranks), folded, count, factors);
}

/// Returns the expected outputs of all ranks, which are empty for a rank that receives nothing.
inline std::vector<Bytes> naive(const Call& call, const std::vector<Bytes>& inputs) {
  const int size = static_cast<int>(inputs.size());
  const std::size_t element = size_of(call.dtype);
  std::vector<Bytes> outputs(inputs.size());
  const auto append = [&](int rank, const Bytes& from, std::int64_t begin, std::int64_t count) {
    Bytes& out = outputs[static_cast<std::size_t>(rank)];
    const auto first = from.begin() + begin * static_cast<std::int64_t>(element);
    out.insert(out.end(), first, first + count * static_cast<std::int64_t>(element));
  };
  const Bytes reduced = is_reduction(call.kind) ? naive_reduction(call, inputs) : Bytes{};
  std::int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const std::int64_t count = elements_out(call, size, rank);
    switch (call.kind) {
      case Kind::AllReduce:
      case Kind::Reduce: append(rank, reduced, 0, count); break;
      case Kind::ReduceScatter:
      case Kind::ReduceScatterV:
        append(rank, reduced, begin, count);
        begin += count;
        break;
      case Kind::Broadcast: append(rank, inputs[static_cast<std::size_t>(call.root)], 0, count); break;
      case Kind::Scatter: append(rank, inputs[static_cast<std::size_t>(call.root)], rank * count, count); break;
      case Kind::ScatterV:
        append(rank, inputs[static_cast<std::size_t>(call.root)], begin, count);
        begin += count;
        break;
      case Kind::AllGather:
      case Kind::AllGatherV:
      case Kind::Gather:
      case Kind::GatherV:
        for (int from = 0; from < size && count > 0; ++from) {
          append(rank, inputs[static_cast<std::size_t>(from)], 0, elements_in(call, size, from));
        }
        break;
      case Kind::AllToAll:
        for (int from = 0; from < size; ++from) {
          append(rank, inputs[static_cast<std::size_t>(from)], rank * call.count, call.count);
        }
        break;
      case Kind::AllToAllV:
        for (int from = 0; from < size; ++from) {
          std::int64_t before = 0;
          for (int to = 0; to < rank; ++to) before += sent(call, size, from, to);
          append(rank, inputs[static_cast<std::size_t>(from)], before, sent(call, size, from, rank));
        }
        break;
      default: break;
    }
  }
  return outputs;
}

}  // namespace cohort::comm::testing
