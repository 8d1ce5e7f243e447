// Operations that only move data, once all ranks agree: what differs between them is which bytes of a rank's input
// another one receives (`block`); how they travel is the same for all.
#include "comm/local/engine.h"

#include "comm/local/plan.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {
namespace {

/// All targets receive the same bytes of a source.
bool shared_blocks(Kind kind) noexcept {
  return kind == Kind::Broadcast || kind == Kind::AllGather || kind == Kind::AllGatherV || kind == Kind::Gather ||
         kind == Kind::GatherV || kind == Kind::Split;
}

}  // namespace

Engine::Block Engine::block(const Request& request, int source, int target) const {
  const std::size_t element = size_of(request.dtype);
  const std::size_t agreed = static_cast<std::size_t>(round_.agreed.count) * element;
  const auto s = static_cast<std::size_t>(source);
  const auto t = static_cast<std::size_t>(target);
  switch (request.kind) {
    case Kind::Broadcast: return source == round_.root && target != source ? Block{0, 0, agreed} : Block{};
    case Kind::AllGather:
    case Kind::Split: return {0, s * agreed, agreed};
    case Kind::Gather: return target == round_.root ? Block{0, s * agreed, agreed} : Block{};
    case Kind::Scatter: return source == round_.root ? Block{t * agreed, 0, agreed} : Block{};
    case Kind::AllGatherV:
    case Kind::GatherV: {
      if (request.kind == Kind::GatherV && target != round_.root) return {};
      const Slice part = part_of(request.counts->input, source);
      return {0, static_cast<std::size_t>(part.begin) * element, static_cast<std::size_t>(part.count()) * element};
    }
    case Kind::ScatterV: {
      if (source != round_.root) return {};
      const Slice part = part_of(request.counts->input, target);
      return {static_cast<std::size_t>(part.begin) * element, 0, static_cast<std::size_t>(part.count()) * element};
    }
    case Kind::AllToAll: {
      const std::size_t each = agreed / static_cast<std::size_t>(size_);
      return {t * each, s * each, each};
    }
    case Kind::AllToAllV: {
      const auto counts_of = [&](int rank) {
        return reinterpret_cast<const std::int64_t*>(layout().payload(world_.control(), rank, sequence_));
      };
      const auto ranks = static_cast<std::size_t>(size_);
      const Slice from = part_of({counts_of(source), ranks}, target);
      const Slice to = part_of({counts_of(target) + ranks, ranks}, source);
      return {static_cast<std::size_t>(from.begin) * element, static_cast<std::size_t>(to.begin) * element,
              static_cast<std::size_t>(from.count()) * element};
    }
    default: return {};
  }
}

std::size_t Engine::largest_block(const Request& request) const {
  std::size_t largest = 0;
  for (int source = 0; source < size_; ++source) {
    for (int target = 0; target < size_; ++target) {
      largest = std::max(largest, block(request, source, target).bytes);
    }
  }
  return largest;
}

void Engine::move_beside(const Request& request) {
  if (serving_) return;
  for (int source = 0; source < size_; ++source) {
    const Block own = block(request, source, rank_);
    if (own.bytes == 0) continue;
    // From the announcement also where it is this rank's own: what was brought, not what the caller has made of it
    // since.
    std::memmove(static_cast<std::byte*>(request.output) + own.to, payload_of(source) + own.from, own.bytes);
  }
}

// Everyone takes what it receives out of the sources' memory.
void Engine::move_direct(const Request& request) {
  for (int step = 0; step < size_; ++step) {
    const int source = (rank_ + step) % size_;  // not all at the same one
    const Block own = serving_ ? Block{} : block(request, source, rank_);
    if (own.bytes == 0) continue;
    std::byte* const to = static_cast<std::byte*>(request.output) + own.to;
    if (source == rank_) {
      copy_pieces(to, static_cast<const std::byte*>(request.input) + own.from, own.bytes);
    } else {
      pull(source, round_.brought[static_cast<std::size_t>(source)].input(), own.from, own.bytes, to);
    }
  }
  finish_round();
}

// A chunk holds the same range of every block. Copying in runs one chunk ahead of copying out.
void Engine::move_staged(const Request& request) {
  const bool shared = shared_blocks(request.kind);
  const auto ranks = static_cast<std::size_t>(size_);
  const std::size_t per_chunk = shared ? layout().chunk_bytes() : layout().chunk_bytes() / ranks / kLine * kLine;
  const std::size_t longest = largest_block(request);
  const std::uint64_t chunks = (longest + per_chunk - 1) / per_chunk;
  void* const control = world_.control();
  const bool stages = !serving_ && !mapped(rank_);
  const auto bytes_of = [&](const Block& whole, std::uint64_t chunk) {
    const std::size_t begin = static_cast<std::size_t>(chunk) * per_chunk;
    return whole.bytes > begin ? std::min(per_chunk, whole.bytes - begin) : std::size_t{0};
  };
  const auto copy_in = [&](std::uint64_t chunk, std::uint64_t number) {
    bool staged = false;
    for (int target = 0; target < size_ && !(shared && staged); ++target) {
      if (target == rank_) continue;
      const Block whole = block(request, rank_, target);
      const std::size_t bytes = bytes_of(whole, chunk);
      if (bytes == 0) continue;
      copy(layout().staging(control, rank_, number) + (shared ? 0 : static_cast<std::size_t>(target) * per_chunk),
           static_cast<const std::byte*>(request.input) + whole.from + static_cast<std::size_t>(chunk) * per_chunk,
           bytes, stores_for(bytes));
      staged = true;
    }
  };
  const auto copy_out = [&](std::uint64_t chunk, std::uint64_t number) {
    for (int step = 0; step < size_ && !serving_; ++step) {
      const int source = (rank_ + step) % size_;
      const Block whole = block(request, source, rank_);
      const std::size_t bytes = bytes_of(whole, chunk);
      if (bytes == 0) continue;
      const std::size_t begin = static_cast<std::size_t>(chunk) * per_chunk;
      const std::byte* from = nullptr;
      if (source == rank_) {
        from = static_cast<const std::byte*>(request.input) + whole.from + begin;
      } else if (mapped(source)) {
        const Location place = round_.brought[static_cast<std::size_t>(source)].input();
        from = remote(source, {place.segment, place.offset + whole.from + begin}, bytes);
      } else {
        from = layout().staging(control, source, number) + (shared ? 0 : static_cast<std::size_t>(rank_) * per_chunk);
      }
      std::byte* const to = static_cast<std::byte*>(request.output) + whole.to + begin;
      if (to != from) std::memmove(to, from, bytes);
    }
  };
  run_one_ahead(Counters{*this}, {chunks_, chunks, stages, true, !stages}, copy_in, copy_out);
  chunks_ += chunks;
}

}  // namespace cohort::comm::local
