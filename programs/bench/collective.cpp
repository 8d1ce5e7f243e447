#include "bench/collective.h"

#include <algorithm>

namespace cohort::app::bench {
namespace {

std::vector<std::int64_t> growing_parts(std::int64_t elements, int ranks) {
  std::vector<std::int64_t> parts;
  const std::int64_t squares = std::int64_t{ranks} * ranks;
  // Quotient and remainder apart, so that the product stays in range.
  const auto until = [&](std::int64_t rank) {
    return elements / squares * rank * rank + elements % squares * rank * rank / squares;
  };
  for (int rank = 0; rank < ranks; ++rank) parts.push_back(until(rank + 1) - until(rank));
  return parts;
}

std::vector<std::int64_t> rotated(const std::vector<std::int64_t>& parts, int by) {
  std::vector<std::int64_t> out(parts);
  std::rotate(out.begin(), out.begin() + by, out.end());
  return out;
}

}  // namespace

const std::vector<Traits>& all_traits() {
  static const std::vector<Traits> kTraits = {
      {Collective::AllReduce, "all_reduce", true, false, true, true, true},
      {Collective::Reduce, "reduce", true, true, true, true, false},
      {Collective::Broadcast, "broadcast", false, true, true, false, false},
      {Collective::AllGather, "all_gather", false, false, true, true, true},
      {Collective::AllGatherV, "all_gather_v", false, false, true, true, true},
      {Collective::Gather, "gather", false, true, true, true, false},
      {Collective::Scatter, "scatter", false, true, true, true, false},
      {Collective::ReduceScatter, "reduce_scatter", true, false, true, true, true},
      {Collective::ReduceScatterV, "reduce_scatter_v", true, false, true, true, true},
      {Collective::AllToAll, "all_to_all", false, false, false, true, true},
      {Collective::AllToAllV, "all_to_all_v", false, false, false, true, true},
      {Collective::PingPong, "send_recv", false, false, false, true, true},
      {Collective::Exchange, "sendrecv", false, false, false, true, true},
      {Collective::Barrier, "barrier", false, false, true, false, true},
  };
  return kTraits;
}

const Traits& traits_of(Collective collective) { return all_traits()[static_cast<std::size_t>(collective)]; }

Shape shape_of(Collective collective, std::size_t bytes, DType dtype, int rank, int ranks) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const auto all = static_cast<std::int64_t>(bytes) / element;
  const auto size = static_cast<std::size_t>(ranks);
  const auto own = static_cast<std::size_t>(rank);
  Shape shape;
  const auto with_parts = [&](std::vector<std::int64_t> parts) {
    shape.count = *std::max_element(parts.begin(), parts.end());
    for (std::size_t part = 0; part < own; ++part) shape.own_part += parts[part];
    shape.bytes = 0;
    for (const std::int64_t part : parts) shape.bytes += static_cast<std::size_t>(part * element);
    shape.input_parts = shape.output_parts = std::move(parts);
  };
  const std::vector<std::int64_t> equal(size, all / ranks);
  switch (collective) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::Broadcast:
    case Collective::PingPong:
    case Collective::Exchange:
      shape.count = shape.input = shape.output = all;
      shape.bytes = static_cast<std::size_t>(all * element);
      return shape;
    case Collective::Barrier: return shape;
    case Collective::AllGather:
    case Collective::Gather:
    case Collective::AllGatherV:
      with_parts(collective == Collective::AllGatherV ? growing_parts(all, ranks) : equal);
      shape.input = shape.input_parts[own];
      shape.output = static_cast<std::int64_t>(shape.bytes) / element;
      return shape;
    case Collective::Scatter:
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV:
      with_parts(collective == Collective::ReduceScatterV ? growing_parts(all, ranks) : equal);
      shape.input = static_cast<std::int64_t>(shape.bytes) / element;
      shape.output = shape.input_parts[own];
      return shape;
    case Collective::AllToAll:
    case Collective::AllToAllV:
      // Rank a's part for rank b is the (a + b)-th: each rank brings and receives every size once.
      with_parts(collective == Collective::AllToAllV ? rotated(growing_parts(all, ranks), rank) : equal);
      shape.input = shape.output = static_cast<std::int64_t>(shape.bytes) / element;
      return shape;
  }
  return shape;
}

double bus_factor(Collective collective, int ranks) {
  const double n = ranks;
  switch (collective) {
    case Collective::AllReduce: return 2 * (n - 1) / n;
    case Collective::AllGather:
    case Collective::AllGatherV:
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::AllToAll:
    case Collective::AllToAllV: return (n - 1) / n;
    default: return 1;
  }
}

double touched_bytes(Collective collective, std::size_t bytes, int ranks, bool in_place) {
  const auto n = static_cast<double>(bytes);
  const double p = ranks;
  const double moved = in_place ? (p - 1) / p : 1;  // what already lies in its place stays there
  switch (collective) {
    case Collective::AllReduce: return 2 * n;               // p n read, p n written
    case Collective::Reduce: return n + n / p;              // p n read, n written
    case Collective::Broadcast: return n;                   // n read, (p - 1) n written
    case Collective::AllGather:                             // n read, p n written
    case Collective::AllGatherV: return n / p + n * moved;  //
    case Collective::Gather:                                // n read, n written
    case Collective::Scatter: return 2 * n * moved / p;     //
    case Collective::ReduceScatter:                         // p n read, n written
    case Collective::ReduceScatterV: return n + n / p;      //
    case Collective::AllToAll:                              // p n read, p n written
    case Collective::AllToAllV: return 2 * n;               //
    case Collective::PingPong: return n;                    // n read, n written, by two
    case Collective::Exchange: return 2 * n;                // twice that
    case Collective::Barrier: return 0;
  }
  return 0;
}

}  // namespace cohort::app::bench
