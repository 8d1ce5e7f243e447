#include "comm/shm/algorithms.h"

#include "base/result.h"
#include "comm/engine/agreement.h"

#include <fmt/format.h>

#include <cstring>
#include <string>

namespace cohort::comm::local {
namespace {

/// Whether this rank's input goes with its descriptor.
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
  if (context.world.ended()) context.throw_if_ended();
  ++context.sequence;
  if (context.size == 1) return;
  choose_inline(context, request);
  Descriptor& own = context.slot(context.rank).descriptor;
  own = describe(request);
  say_begun(context, own);
  // Else nobody will look at the memory itself.
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
  bool uniform = context.is_inline && own.descriptor.weighted == 0;
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
