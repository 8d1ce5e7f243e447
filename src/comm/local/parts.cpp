#include "comm/local/parts.h"

#include "comm/control/operation.h"
#include "comm/local/execute.h"
#include "comm/local/moves.h"
#include "comm/local/reductions.h"
#include "comm/local/round.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {
namespace {

/// All ranks of the host bring this, each its own memory.
void begin_part(Context& context, const Request& part) {
  context.agreement.settle_on(describe(part));
  context.serving = false;
  context.non_finite = false;
  for (Descriptor& brought : context.agreement.brought) brought.input_segment = 0;
  if (is_reduction(part.kind)) context.contributors.set(context.agreement);
}

/// The ranks' counters where one rank alone stages.
struct RootStages {
  using State = RankState;
  Context& context;
  const int root;
  void wait(Context::CounterOf counter, std::uint64_t number) const {
    if (counter != &RankState::staged) return context.wait(counter, number);
    const auto has_come = [&] { return reached(context.state(root).staged.value, number); };
    context.wait_until(has_come, [&] { return has_come() ? std::vector<int>() : std::vector<int>{root}; });
  }
  void post(Context::CounterOf counter, std::uint64_t number) const noexcept {
    if (counter != &RankState::staged || context.rank == root) return context.post(counter, number);
    publish(context.state(context.rank).staged.value, number);  // nobody is to wake for it
  }
};

}  // namespace

const Agreement& meet(Context& context, const Descriptor& own, const Request* request, bool with_input) {
  context.throw_if_ended();
  ++context.sequence;
  context.is_inline = with_input;
  context.is_tiny = with_input && request->input_bytes() <= Slot::kTiny;
  Descriptor& brought = context.slot(context.rank).descriptor;
  brought = own;
  brought.check_finite = 0;
  if (request != nullptr && !with_input) note_memory(context, *request, brought);
  const bool brings = with_input && context.rank != 0 && request->input_count > 0;  // rank 0 has its own
  publish_descriptor(context, brings ? request : nullptr);
  gather(context);
  context.measure_again();
  context.inputs.clear();
  for (int rank = 0; rank < context.size && !with_input; ++rank)
    context.inputs.push_back(context.brought(rank).input());
  return context.agreement;
}

void fold_inline(Context& context, const Request& part) {
  begin_part(context, part);
  reduce_inline(context, part);
}

void hand_out(Context& context, int root, void* data, std::size_t bytes) {
  const std::size_t per_chunk = context.layout.chunk_bytes();
  const auto place = [&](std::uint64_t chunk) { return static_cast<std::byte*>(data) + chunk * per_chunk; };
  const auto bytes_of = [&](std::uint64_t chunk) { return std::min(per_chunk, bytes - chunk * per_chunk); };
  Chunks chunks = context.next_chunks((bytes + per_chunk - 1) / per_chunk);
  chunks.stages = context.rank == root;
  chunks.takes = context.rank != root;
  run_one_ahead(
      RootStages{context, root}, chunks,
      [&](std::uint64_t chunk, std::uint64_t number) {
        std::memcpy(context.staging(root, number), place(chunk), bytes_of(chunk));
      },
      [&](std::uint64_t chunk, std::uint64_t number) {
        std::memcpy(place(chunk), context.staging(root, number), bytes_of(chunk));
      });
}

// Registered inputs are read in place, at once: they have been there since all met. Who brings one has it back when the
// all_gather that ends the block has begun on all ranks.
void reduce_scatter_part(Context& context, const Request& part, std::optional<std::int64_t> begin) {
  begin_part(context, part);
  if (begin && context.plan.zero_copy != 0) {
    const std::size_t offset = static_cast<std::size_t>(*begin) * size_of(part.dtype);
    for (std::size_t rank = 0; rank < context.inputs.size(); ++rank) {
      context.agreement.brought[rank].input_segment = context.inputs[rank].segment;
      context.agreement.brought[rank].input_offset = context.inputs[rank].offset + offset;
    }
  }
  if (context.inputs_mapped()) {
    reduce_scatter_direct(context, part);
  } else {
    reduce_scatter_chunked(context, part);
  }
  context.check_reads();
}

std::uint64_t all_gather_part(Context& context, const Request& part) {
  begin_part(context, part);
  if (largest_block(context, part) < context.plan.cross_copy_bytes) {
    move_chunked(context, part);
    return 0;
  }
  run_one_ahead(
      context, context.next_chunks(1),
      [&](std::uint64_t, std::uint64_t number) {
        context.state(context.rank).borrowed[number % 2] = reinterpret_cast<std::uint64_t>(part.input);
      },
      [&](std::uint64_t, std::uint64_t number) {
        for (int step = 0; step < context.size; ++step) {
          const int source = (context.rank + step) % context.size;  // not all at the same one
          const MovedBlock block = block_of(context, part, source, context.rank);
          std::byte* const to = static_cast<std::byte*>(part.output) + block.to;
          if (source == context.rank) {
            context.copy_pieces(to, static_cast<const std::byte*>(part.input), block.bytes);
          } else {
            context.pull(source, {0, context.state(source).borrowed[number % 2]}, 0, block.bytes, to);
          }
        }
      });
  context.check_reads();
  return context.chunks;
}

void wait_until_read(Context& context, std::uint64_t number) {
  if (number > 0) context.wait(&RankState::reduced, number);
}

void run_part(Context& context, const Request& part) {
  announce(context, part);
  gather(context);
  if (part.kind == Kind::AllToAllV) check_room_for_counts(context);
  execute(context, part, nullptr);
  if (!context.is_inline) context.check_reads();
}

}  // namespace cohort::comm::local
