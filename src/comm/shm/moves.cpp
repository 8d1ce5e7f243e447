#include "base/result.h"
#include "comm/api/request.h"
#include "comm/engine/agreement.h"
#include "comm/shm/algorithms.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace cohort::comm::local {
namespace {

/// True if all targets receive the same bytes from a source.
bool shared_blocks(Kind kind) noexcept {
  return kind == Kind::Broadcast || kind == Kind::AllGather || kind == Kind::AllGatherV || kind == Kind::Gather ||
         kind == Kind::GatherV || kind == Kind::Split;
}

/// Notes the block's location in `request.borrowed` instead of copying the block to `to`. Returns false if it has to be
/// copied.
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
    // Reads this rank's own input from its slot, too, since the slot has it as it was given, even if the caller has
    // changed it since.
    std::memmove(static_cast<std::byte*>(request.output) + own.to, context.inline_input(source) + own.from, own.bytes);
  }
}

void move_direct(Context& context, const Request& request) {
  for (int step = 0; step < context.size && !context.serving; ++step) {
    const int source = (context.rank + step) % context.size;  // ranks begin at different sources
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

// A chunk holds the same range of every block. Chunks are copied in one ahead of copying out.
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
      const int source = (context.rank + step) % context.size;  // ranks begin at different sources
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

namespace {

/// True if this rank's input is sent with its descriptor.
bool brings_inline(const Context& context, const Request& request) noexcept {
  if (request.input_count == 0 || !context.is_inline) return false;
  const bool is_root = request.root == context.rank;
  const bool from_root =
      request.kind == Kind::Broadcast || request.kind == Kind::Scatter || request.kind == Kind::ScatterV;
  return from_root ? is_root : request.kind != Kind::Reduce || !is_root;
}

std::size_t row_bytes(const Context& context) noexcept {
  return static_cast<std::size_t>(context.size) * sizeof(std::int64_t);
}

void note_counts(const Context& context, const Counts& counts) noexcept {
  const std::size_t row = row_bytes(context);
  if (!context.has_room_inline(2 * row)) return;
  std::byte* const to = context.payload(context.rank);
  std::memcpy(to, counts.input.data(), row);
  std::memcpy(to + row, counts.output.data(), row);
}

void say_begun(const Context& context, const Descriptor& own) noexcept {
  context.lane().begin(context.sequence,
                       status::LaneStatus::pack(static_cast<std::uint8_t>(own.kind), own.dtype, own.op),
                       own.kind == Kind::Joined ? 0 : own.count);
}

}  // namespace

void announce(Context& context, const Request& request) {
  if (context.world.ended()) context.throw_ended_before(to_string(describe(request)));
  ++context.sequence;
  if (context.size == 1) return;
  choose_inline(context, request);
  Descriptor& own = context.slot(context.rank).descriptor;
  own = describe(request);
  say_begun(context, own);
  // In other cases no peer accesses the memory.
  if (!context.is_inline && request.round == nullptr) note_memory(context, request, own);
  if (request.kind == Kind::AllToAllV) note_counts(context, *request.counts);
  publish_descriptor(context, brings_inline(context, request) ? &request : nullptr);
}

void announce_joined(Context& context, std::int64_t ticket) {
  context.lane().end(context.sequence);
  ++context.sequence;
  context.is_inline = false;
  Descriptor& own = context.slot(context.rank).descriptor;
  own = Descriptor{};
  own.kind = Kind::Joined;
  own.count = ticket;
  say_begun(context, own);
  publish_descriptor(context, nullptr);
}

void choose_inline(Context& context, const Request& request) noexcept {
  const std::size_t bytes = inline_bytes(request, context.size);
  const std::uint64_t most = !is_reduction(request.kind)    ? context.plan.inline_copy_bytes
                             : request.kind == Kind::Reduce ? context.plan.inline_root_bytes
                                                            : context.plan.inline_bytes;
  context.is_inline = bytes <= most && request.kind != Kind::AllToAllV && request.round == nullptr;
  context.is_tiny = bytes <= Slot::kTiny;
}

void note_memory(const Context& context, const Request& request, Descriptor& own) {
  const auto& mesh = context.world.mesh();
  own.input_offset = reinterpret_cast<std::uint64_t>(request.input);
  own.output_offset = reinterpret_cast<std::uint64_t>(request.output);
  if (const auto place = mesh->locate(request.input, request.input_bytes())) {
    own.input_segment = place->segment;
    own.input_offset = place->offset;
  }
  if (request.output == request.input && request.output_count == request.input_count) {
    own.output_segment = own.input_segment;
    own.output_offset = own.input_offset;
  } else if (const auto there = mesh->locate(request.output, request.output_bytes())) {
    own.output_segment = there->segment;
    own.output_offset = there->offset;
  }
}

void publish_descriptor(Context& context, const Request* with) {
  Slot& slot = context.slot(context.rank);
  slot.descriptor.announcements = context.world.mesh()->announcements();
  slot.fingerprint = fingerprint_of(slot.descriptor);
  if (with != nullptr && context.is_tiny) {
    std::memcpy(slot.tiny, with->input, with->input_bytes());
  } else if (with != nullptr) {
    copy(context.payload(context.rank), with->input, with->input_bytes(), context.stores_for(with->input_bytes()));
  }
  publish(slot.sequence, context.sequence);
  context.world.ring();
}

bool await_peers(Context& context, std::chrono::microseconds patience) {
  return context.size == 1 ||
         context.wait_a_while_for_all([&](int rank) { return context.has_announced(rank); }, patience);
}

bool await_peers(Context& context, std::chrono::steady_clock::time_point limit) {
  return context.size == 1 || context.wait_for_all([&](int rank) { return context.has_announced(rank); }, limit);
}

void gather(Context& context) {
  context.wait_for_all([&](int rank) { return context.has_announced(rank); });
  const Slot& own = context.slot(context.rank);
  context.serving = own.descriptor.kind == Kind::Joined;
  bool uniform = context.is_inline && own.descriptor.weight > 0;
  for (int rank = 0; rank < context.size && uniform; ++rank) {
    uniform = context.slot(rank).fingerprint == own.fingerprint;
  }
  if (uniform) return context.agreement.settle_on(own.descriptor);
  Mesh& mesh = *context.world.mesh();
  for (int rank = 0; rank < context.size; ++rank) {
    Descriptor& brought = context.agreement.brought[static_cast<std::size_t>(rank)];
    brought = context.slot(rank).descriptor;
    if (rank != context.rank && mesh.received(rank) < brought.announcements) {
      if (const auto got = mesh.receive(rank, brought.announcements); !got) {
        context.end_world(got.error().code(), rank, got.error().what());
      }
    }
  }
  context.agreement.settle();
}

const std::int64_t* counts_of(const Context& context, int from) noexcept {
  return reinterpret_cast<const std::int64_t*>(context.payload(from));
}

void check_room_for_counts(const Context& context) {
  if (context.has_room_inline(2 * row_bytes(context))) return;
  throw Error(ErrorCode::Unavailable,
              fmt::format("all_to_all_v failed -- rank {} ({}) -- {} ranks on one host are more than it can serve ({})",
                          context.rank, context.world.host(), context.size,
                          context.layout.payload_bytes() / 2 / sizeof(std::int64_t)),
              ErrorContext{});
}

std::optional<Disagreement> disagreement(const Context& context) {
  const Agreement& agreement = context.agreement;
  auto found = agreement.disagreement(context.rank, [](int) { return std::string(); });
  if (found || agreement.agreed.kind != Kind::AllToAllV) return found;
  check_room_for_counts(context);
  return compare_counts(
      context.size, context.rank, [&](int from, int to) { return counts_of(context, from)[to]; },
      [&](int to, int from) { return counts_of(context, to)[context.size + from]; });
}

}  // namespace cohort::comm::local
