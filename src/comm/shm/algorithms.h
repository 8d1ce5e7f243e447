// Parts of an operation on one host, each a function over the Context: the round, and the ways in which data is folded
// and moved. They run on all ranks, on the thread that runs operations.
#pragma once

#include "comm/api/request.h"
#include "comm/engine/agreement.h"
#include "comm/kernels/fold.h"
#include "comm/shm/context.h"

#include <cohort/observer.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace cohort::comm::local {

// Runs an operation, by the path chosen for it, once all ranks of a host have come to it. Every operation begins with a
// round (see below): disagreement is refused by all ranks before any result is delivered. Then
//   inline      the payloads came with the descriptors and everyone takes what it needs: one wait
//   zero-copy   registered memory is read (and for reductions written) in place by all ranks
//   cross       other memory is read through the kernel (cross-memory attach), once
//   chunked     other memory goes through double buffers in the control memory, chunk by chunk
// The plan (plan.h) says which; all give the same bits. The functions run on all ranks, on the thread that runs
// operations. After a failure other than Mismatch the world has ended, and every further operation fails with the first
// cause.

/// All but the announcement of an operation. Throws Mismatch (and the context may be used again) or what ended the
/// world. `event`, if any, gets sequence, waiting time and whether staging copies were needed.
void complete(Context& context, const Request& request, CollectiveEvent* event);
/// Serves the others' operations until all ranks have joined; `patience` is for each of them. Gives the last.
int join(Context& context, std::chrono::milliseconds patience);
/// Runs the operation that all have agreed on.
void execute(Context& context, const Request& request, CollectiveEvent* event);

// Rounds: every operation begins with all ranks publishing their descriptions, each in a slot of its own, and reading
// all others', so that all come to the same decision before any result is delivered. Small payloads go along. The
// functions run on all ranks, on the thread that runs operations.

/// Publishes this rank's description of the next operation. Throws what ended the world.
void announce(Context& context, const Request& request);
/// The same of a rank that has joined, and so serves the others.
void announce_joined(Context& context, std::int64_t ticket);
/// True once all ranks have announced; false if that takes longer than about `patience`, for all of which the caller
/// keeps its core.
bool await_peers(Context& context, std::chrono::microseconds patience);
/// The same until `limit`, sleeping when it takes long. Throws what ends the world meanwhile.
bool await_peers(Context& context, std::chrono::steady_clock::time_point limit);
/// Collects all announcements into the context's `agreement`. Throws what ends the world while it waits for them.
void gather(Context& context);
/// The ranks' disagreement, as this one sees it.
std::optional<Disagreement> disagreement(const Context& context);

/// Decides whether payloads of the request go inline: all ranks decide alike.
void choose_inline(Context& context, const Request& request) noexcept;
/// Notes the location of the request's memory, so that peers can reach it.
void note_memory(const Context& context, const Request& request, Descriptor& own);
/// The descriptor is in this rank's slot already. `with`: whose input goes inline, if any.
void publish_descriptor(Context& context, const Request* with);
/// Counts of an all_to_all_v: what `from` sends to each rank, and behind that what it expects of each.
const std::int64_t* counts_of(const Context& context, int from) noexcept;
void check_room_for_counts(const Context& context);

/// Folds what the context has collected, in pieces: between them it is looked whether the world has ended.
void fold_pieces(Context& context, std::int64_t count, Stores stores = Stores::Cached);

// Reductions on one host, once all ranks agree: each method is a function. All run on all ranks, also on those that
// have joined, which take their part of the work without input and output. Elements are folded by ascending rank
// whatever the method, so all give the same bits.

// all_reduce and reduce
/// Each rank that gets the result folds all of it, out of what came with the descriptors.
void reduce_inline(Context& context, const Request& request);
/// Each rank folds its slice straight out of all ranks' registered memory into that of all that get the result.
void reduce_zero_copy(Context& context, const Request& request);
/// all_reduce whose outputs are registered, not all of the inputs.
void all_reduce_by_output(Context& context, const Request& request);
/// all_reduce of other memory, read through the kernel.
void all_reduce_cross(Context& context, const Request& request);
/// Two ranks stage their whole inputs, and each that gets the result folds both.
void reduce_exchanged(Context& context, const Request& request);
/// Chunk by chunk through the buffers. `cross`: inputs are read through the kernel instead.
void reduce_chunked(Context& context, const Request& request, bool cross);

// reduce_scatter
void reduce_scatter_inline(Context& context, const Request& request);
/// Reduces out of the peers' memory, in place or through the kernel. They may not write it before all have done that.
void reduce_scatter_direct(Context& context, const Request& request);
void reduce_scatter_chunked(Context& context, const Request& request);

// Operations on one host that only move data, once all ranks agree: what differs between them is which bytes of a
// rank's input another one receives (`block_of`); how they travel is the same for all. The functions run on all ranks.

/// Bytes of rank `source`'s input that rank `target` receives: where they lie there and go here.
struct MovedBlock {
  std::size_t from = 0;
  std::size_t to = 0;
  std::size_t bytes = 0;
};
MovedBlock block_of(const Context& context, const Request& request, int source, int target);
std::size_t largest_block(const Context& context, const Request& request);

/// Moves out of what came with the descriptors.
void move_inline(Context& context, const Request& request);
/// Everyone takes what it receives out of the sources' memory.
void move_direct(Context& context, const Request& request);
/// Chunk by chunk through the staging buffers.
void move_chunked(Context& context, const Request& request);

// The ranks of a host in an operation of a larger world (comm/hosts): all do the same parts in the same order. They
// announce their inputs once (`meet`), and after that counters alone show when a peer has staged, borrowed or read
// something; only `run_part` negotiates again. The functions run on all ranks of the host, on the thread that runs the
// operation.

/// All ranks learn the others' descriptions. `request` null: the rank has joined. `with_input`: there is no input, or
/// it is one of a reduction and fits inline, for `fold_inline`. Valid until the next call.
const Agreement& meet(Context& context, const Descriptor& own, const Request* request, bool with_input);
/// Folds, on rank 0 to `part.output`, what all ranks sent inline.
void fold_inline(Context& context, const Request& part);
/// Moves from `root` to all, through its buffers: the others wait for nobody else.
void hand_out(Context& context, int root, void* data, std::size_t bytes);
/// A reduce_scatter_v. `begin`: it is of the operation's inputs from this element on; else of other memory.
void reduce_scatter_part(Context& context, const Request& part, std::optional<std::int64_t> begin);
/// An all_gather_v. Gives what `wait_until_read` has to be asked for before the input is written again; 0: nothing.
std::uint64_t all_gather_part(Context& context, const Request& part);
void wait_until_read(Context& context, std::uint64_t number);
/// Any other operation, in which memory may lie anywhere: it is announced like one of this host alone.
void run_part(Context& context, const Request& part);

}  // namespace cohort::comm::local
