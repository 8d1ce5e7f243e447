#include "base/result.h"
#include "comm/api/work_state.h"
#include "comm/engine/agreement.h"
#include "comm/shm/algorithms.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {
namespace {

enum class Path { Inline, ZeroCopy, ByOutput, Cross, Exchanged, Chunked };

// Size up to which two ranks stage their whole inputs, to save a wait. For larger inputs, staging only half of the
// bytes saves more.
constexpr std::size_t kMostExchanged = std::size_t{1} << 20;

/// True if no rank has to copy data to memory that peers can read.
bool is_in_place(const Context& context) noexcept {
  const Agreement& agreement = context.agreement;
  switch (agreement.agreed.kind) {
    case Kind::AllReduce: return context.inputs_mapped() && context.outputs_mapped();
    case Kind::Reduce: return context.inputs_mapped() && context.brought(agreement.root).output_segment != 0;
    case Kind::Broadcast:
    case Kind::Scatter:
    case Kind::ScatterV: return context.mapped(agreement.root);
    default: return context.inputs_mapped();
  }
}

/// Bytes that one rank reads from another with one system call.
std::size_t bytes_at_once(const Context& context, const Request& request) {
  const auto ranks = static_cast<std::size_t>(context.size);
  const std::size_t agreed = static_cast<std::size_t>(context.agreement.agreed.count) * size_of(request.dtype);
  switch (context.agreement.agreed.kind) {
    case Kind::AllReduce:
    case Kind::Reduce:
    case Kind::ReduceScatterV:
    case Kind::AllToAll: return agreed / ranks;
    case Kind::AllGatherV:
    case Kind::GatherV: return inline_bytes(request, context.size);
    case Kind::AllToAllV:
    case Kind::ScatterV: return largest_block(context, request);
    default: return agreed;
  }
}

/// True for operations in which one rank's core would move all data if blocks were read through the kernel, while the
/// data's owner waits. (A scatter's root copies its own block meanwhile, which is as long.)
bool moves_on_one_core(Kind kind) noexcept {
  return kind == Kind::Broadcast || kind == Kind::Gather || kind == Kind::GatherV;
}

Path choose(const Context& context, const Request& request) {
  const Agreement& agreement = context.agreement;
  const Kind kind = agreement.agreed.kind;
  if (context.is_inline) {
    // A small broadcast's data did not come inline if it comes from a rank other than the announced root.
    return kind != Kind::Broadcast || agreement.root == agreement.agreed.root ? Path::Inline : Path::Chunked;
  }
  if (context.plan.zero_copy != 0) {
    if (is_in_place(context)) return Path::ZeroCopy;
    if (kind == Kind::AllReduce && context.outputs_mapped()) return Path::ByOutput;
  }
  const bool everyone = static_cast<int>(agreement.active.size()) == context.size;
  const std::uint64_t least = is_reduction(kind) ? context.plan.cross_reduce_bytes : context.plan.cross_copy_bytes;
  const std::size_t at_once = bytes_at_once(context, request);
  // Reads through the kernel only if the size is worth a system call.
  const bool staged = moves_on_one_core(kind) && at_once >= context.plan.staged_copy_bytes;
  if (everyone && at_once >= least && !staged) return Path::Cross;
  const bool exchangeable = kind == Kind::AllReduce || kind == Kind::Reduce;
  return exchangeable && everyone && context.size == 2 && request.input_bytes() <= kMostExchanged ? Path::Exchanged
                                                                                                  : Path::Chunked;
}

void reduce(Context& context, const Request& request, Path path) {
  switch (path) {
    case Path::Inline: return reduce_inline(context, request);
    case Path::ZeroCopy: return reduce_zero_copy(context, request);
    case Path::ByOutput: return all_reduce_by_output(context, request);
    case Path::Cross:
      return context.is_rooted() ? reduce_chunked(context, request, true) : all_reduce_cross(context, request);
    case Path::Exchanged: return reduce_exchanged(context, request);
    case Path::Chunked: return reduce_chunked(context, request, false);
  }
}

void reduce_scatter(Context& context, const Request& request, Path path) {
  if (path == Path::Inline) return reduce_scatter_inline(context, request);
  if (path == Path::Chunked) return reduce_scatter_chunked(context, request);
  reduce_scatter_direct(context, request);
  context.finish_round();
}

void move(Context& context, const Request& request, Path path) {
  if (path == Path::Inline) return move_inline(context, request);
  if (path == Path::Chunked) return move_chunked(context, request);
  move_direct(context, request);
}

/// Runs an operation in a world of one.
void run_alone(Context& context, const Request& request) {
  if (request.output == nullptr || request.output_count == 0) return;
  if (request.weighted && request.weight == 0) {
    std::memset(request.output, 0, request.output_bytes());
  } else if (is_reduction(request.kind) && (request.prescale != 1 || request.postscale != 1)) {
    context.agreement.active = context.agreement.everyone;
    context.agreement.agreed = describe(request);
    context.agreement.agreed.weighted = 0;
    context.contributors.set(context.agreement);
    context.fold_inputs.assign(1, request.input);
    context.fold_outputs.assign(1, request.output);
    fold_pieces(context, request.output_count);
  } else if (request.input != request.output) {
    std::memmove(request.output, request.input, request.output_bytes());
  }
}

// Notes whether an all_reduce's results are finite. This rank knows its own result, and has seen the others' posts.
void report_finite(const Context& context, FiniteCheck& finite_check) noexcept {
  bool finite = !context.non_finite;
  for (int rank = 0; rank < context.size && finite; ++rank) {
    finite = context.state(rank).non_finite[context.sequence % 2].load(std::memory_order_relaxed) != context.sequence;
  }
  finite_check.note(finite);
}

}  // namespace

void execute(Context& context, const Request& request, CollectiveEvent* event) {
  const Path path = choose(context, request);
  context.non_finite = false;
  if (event != nullptr) event->zero_copy = path == Path::ZeroCopy;
  if (path == Path::Exchanged || path == Path::Chunked) context.measure_again();
  const Kind kind = context.agreement.agreed.kind;
  if (is_reduction(kind)) context.contributors.set(context.agreement);
  switch (kind) {
    case Kind::AllReduce:
    case Kind::Reduce: return reduce(context, request, path);
    case Kind::ReduceScatter:
    case Kind::ReduceScatterV: return reduce_scatter(context, request, path);
    case Kind::Broadcast:
    case Kind::AllGather:
    case Kind::AllGatherV:
    case Kind::Gather:
    case Kind::GatherV:
    case Kind::Scatter:
    case Kind::ScatterV:
    case Kind::AllToAll:
    case Kind::AllToAllV:
    case Kind::Split: return move(context, request, path);
    case Kind::None:
    case Kind::Barrier:
    case Kind::Joined:
    case Kind::Send:
    case Kind::Recv: return;  // a barrier is done after the round
  }
}

void complete(Context& context, const Request& request, CollectiveEvent* event) {
  if (event != nullptr) {
    event->sequence = context.sequence;
    event->group = context.world.group();
  }
  if (context.size == 1) return run_alone(context, request);
  gather(context);
  if (event != nullptr) event->waited = std::chrono::steady_clock::now() - event->begun;
  if (!context.agreement.uniform) {
    if (auto found = disagreement(context)) {
      const std::string own = to_string(context.brought(context.rank));
      throw refusal(own, context.rank, context.world.host(), context.sequence, *std::move(found));
    }
  }
  if (request.round != nullptr) {
    *request.round = round_of(context.agreement);
    return context.lane().end(context.sequence);
  }
  execute(context, request, event);
  // A late rank can complete an operation that others have given up, and read memory that they have changed since.
  if (!context.is_inline) context.check_reads();
  if (request.finite_check) report_finite(context, *request.finite_check);
  context.lane().end(context.sequence);
}

int join(Context& context, std::chrono::milliseconds patience) {
  if (context.world.ended()) context.throw_ended_before(std::string(name_of(Kind::Joined)));
  if (context.size == 1) return 0;
  const std::int64_t ticket = context.world.header().join_tickets.fetch_add(1);
  while (true) {
    context.deadline().begin(std::chrono::steady_clock::now(), patience);
    announce_joined(context, ticket);
    gather(context);
    if (context.agreement.active.empty()) break;
    if (disagreement(context)) continue;  // the active ranks report it; this rank gave no description
    if (context.agreement.agreed.round != 0) continue;
    const Request served = request_to_serve(context.agreement.agreed);
    choose_inline(context, served);
    execute(context, served, nullptr);
  }
  context.lane().end(context.sequence);
  return context.agreement.last_joined();
}

namespace {

/// Begins a part that all ranks of the host run, each on its own memory.
void begin_part(Context& context, const Request& part) {
  context.agreement.settle_on(describe(part));
  context.serving = false;
  context.non_finite = false;
  for (Descriptor& brought : context.agreement.brought) brought.input_segment = 0;
  if (is_reduction(part.kind)) context.contributors.set(context.agreement);
}

/// Counters of the ranks, as `run_one_ahead` needs them, for an operation in which only the root stages.
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
    publish(context.state(context.rank).staged.value, number);  // wakes no rank, since none waits for this counter
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
  const bool brings = with_input && context.rank != 0 && request->input_count > 0;  // rank 0 folds its own input
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

// Registered inputs are read in place without waiting, since they have been valid since `meet`. A rank may change its
// input again after the all_gather that ends the block has begun on all ranks.
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
          const int source = (context.rank + step) % context.size;  // ranks begin at different sources
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
