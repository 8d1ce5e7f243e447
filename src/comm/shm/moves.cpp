#include "comm/shm/algorithms.h"

#include "comm/api/device_op.h"
#include "comm/api/slices.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace cohort::comm::local {
namespace {

/// All targets receive the same bytes of a source.
bool shared_blocks(Kind kind) noexcept {
  return kind == Kind::Broadcast || kind == Kind::AllGather || kind == Kind::AllGatherV || kind == Kind::Gather ||
         kind == Kind::GatherV || kind == Kind::Split;
}

/// Notes where the block lies, where that is as good as a copy to `to`.
bool lend(Context& context, const Request& request, int source, const MovedBlock& block, const std::byte* to) {
  const std::byte* from = nullptr;
  std::shared_ptr<const sys::Mapping> memory;
  if (source == context.rank) {
    from = static_cast<const std::byte*>(request.input) + block.from;
  } else if (context.mapped(source)) {
    const Location input = context.brought(source).input();
    from = context.remote(source, {input.segment, input.offset + block.from}, block.bytes);
    memory = context.world.mesh()->mapping(source, input.segment);
  }
  if (from == nullptr || from == to) return false;
  request.borrowed->push_back({block.to, from, block.bytes, std::move(memory)});
  return true;
}

}  // namespace

MovedBlock block_of(const Context& context, const Request& request, int source, int target) {
  const std::size_t element = size_of(request.dtype);
  const std::size_t agreed = static_cast<std::size_t>(context.agreement.agreed.count) * element;
  const int root = context.agreement.root;
  const auto s = static_cast<std::size_t>(source);
  const auto t = static_cast<std::size_t>(target);
  const auto begin = [&](const Slice& part) { return static_cast<std::size_t>(part.begin) * element; };
  const auto bytes = [&](const Slice& part) { return static_cast<std::size_t>(part.count()) * element; };
  switch (request.kind) {
    case Kind::Broadcast: return source == root && target != source ? MovedBlock{0, 0, agreed} : MovedBlock{};
    case Kind::AllGather:
    case Kind::Split: return {0, s * agreed, agreed};
    case Kind::Gather: return target == root ? MovedBlock{0, s * agreed, agreed} : MovedBlock{};
    case Kind::Scatter: return source == root ? MovedBlock{t * agreed, 0, agreed} : MovedBlock{};
    case Kind::AllGatherV:
    case Kind::GatherV: {
      if (request.kind == Kind::GatherV && target != root) return {};
      const Slice part = part_of(request.counts->input, source);
      return {0, begin(part), bytes(part)};
    }
    case Kind::ScatterV: {
      if (source != root) return {};
      const Slice part = part_of(request.counts->input, target);
      return {begin(part), 0, bytes(part)};
    }
    case Kind::AllToAll: {
      const std::size_t each = agreed / static_cast<std::size_t>(context.size);
      return {t * each, s * each, each};
    }
    case Kind::AllToAllV: {
      const auto ranks = static_cast<std::size_t>(context.size);
      const Slice from = part_of({counts_of(context, source), ranks}, target);
      const Slice to = part_of({counts_of(context, target) + ranks, ranks}, source);
      return {begin(from), begin(to), bytes(from)};
    }
    default: return {};
  }
}

std::size_t largest_block(const Context& context, const Request& request) {
  std::size_t largest = 0;
  for (int source = 0; source < context.size; ++source) {
    for (int target = 0; target < context.size; ++target) {
      largest = std::max(largest, block_of(context, request, source, target).bytes);
    }
  }
  return largest;
}

void move_inline(Context& context, const Request& request) {
  if (context.serving) return;
  for (int source = 0; source < context.size; ++source) {
    const MovedBlock own = block_of(context, request, source, context.rank);
    if (own.bytes == 0) continue;
    // From the slot also where it is this rank's own: what was brought, not what the caller has made of it since.
    std::memmove(static_cast<std::byte*>(request.output) + own.to, context.inline_input(source) + own.from, own.bytes);
  }
}

void move_direct(Context& context, const Request& request) {
  for (int step = 0; step < context.size && !context.serving; ++step) {
    const int source = (context.rank + step) % context.size;  // not all at the same one
    const MovedBlock own = block_of(context, request, source, context.rank);
    if (own.bytes == 0) continue;
    std::byte* const to = static_cast<std::byte*>(request.output) + own.to;
    if (request.borrowed != nullptr && lend(context, request, source, own, to)) continue;
    if (source == context.rank) {
      context.copy_pieces(to, static_cast<const std::byte*>(request.input) + own.from, own.bytes);
    } else {
      context.pull(source, context.brought(source).input(), own.from, own.bytes, to);
    }
  }
  context.finish_round();
}

// A chunk holds the same range of every block. Copying in runs one chunk ahead of copying out.
void move_chunked(Context& context, const Request& request) {
  const bool shared = shared_blocks(request.kind);
  const auto ranks = static_cast<std::size_t>(context.size);
  const std::size_t most = context.layout.chunk_bytes();
  const std::size_t per_chunk = shared ? most : most / ranks / kLine * kLine;
  const auto place = [&](int target) { return shared ? 0 : static_cast<std::size_t>(target) * per_chunk; };
  const auto bytes_of = [&](const MovedBlock& whole, std::size_t begin) {
    return whole.bytes > begin ? std::min(per_chunk, whole.bytes - begin) : std::size_t{0};
  };
  const auto copy_in = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::size_t begin = static_cast<std::size_t>(chunk) * per_chunk;
    bool staged = false;
    for (int target = 0; target < context.size && !(shared && staged); ++target) {
      if (target == context.rank) continue;
      const MovedBlock whole = block_of(context, request, context.rank, target);
      const std::size_t bytes = bytes_of(whole, begin);
      if (bytes == 0) continue;
      copy(context.staging(context.rank, number) + place(target),
           static_cast<const std::byte*>(request.input) + whole.from + begin, bytes, context.stores_for(bytes));
      staged = true;
    }
  };
  const auto copy_out = [&](std::uint64_t chunk, std::uint64_t number) {
    const std::size_t begin = static_cast<std::size_t>(chunk) * per_chunk;
    for (int step = 0; step < context.size && !context.serving; ++step) {
      const int source = (context.rank + step) % context.size;  // not all at the same one
      const MovedBlock whole = block_of(context, request, source, context.rank);
      const std::size_t bytes = bytes_of(whole, begin);
      if (bytes == 0) continue;
      const std::byte* from = nullptr;
      if (source == context.rank) {
        from = static_cast<const std::byte*>(request.input) + whole.from + begin;
      } else if (context.mapped(source)) {
        const Location input = context.brought(source).input();
        from = context.remote(source, {input.segment, input.offset + whole.from + begin}, bytes);
      } else {
        from = context.staging(source, number) + place(context.rank);
      }
      std::byte* const to = static_cast<std::byte*>(request.output) + whole.to + begin;
      if (to != from) std::memmove(to, from, bytes);
    }
  };
  Chunks chunks = context.next_chunks((largest_block(context, request) + per_chunk - 1) / per_chunk);
  chunks.stages = !context.serving && !context.mapped(context.rank);
  chunks.lends = !chunks.stages;
  run_one_ahead(context, chunks, copy_in, copy_out);
}

}  // namespace cohort::comm::local
