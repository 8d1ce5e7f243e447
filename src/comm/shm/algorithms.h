// Parts of an operation on one host: the round, and the methods of folding and moving data. Each is a function over the
// Context that runs on all ranks, on the thread that runs operations.
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

// Runs an operation after all ranks of a host have come to it. Every operation begins with a round (see below): if the
// ranks disagree, all refuse the operation before any result is delivered. Then data takes one of these paths:
//   inline      the payloads came with the descriptors, and each rank copies or folds what it needs, with one wait
//   zero-copy   registered memory is read (and for reductions written) in place by all ranks
//   cross       other memory is read through the kernel (cross-memory attach), once
//   chunked     other memory is copied through double buffers in the control memory, chunk by chunk
// The plan (plan.h) chooses the path; all paths give the same bits. The functions run on all ranks, on the thread that
// runs operations. After a failure other than Mismatch the world has ended, and every further operation fails with the
// first cause.

/// Runs an operation that has been announced. Throws Mismatch, after which the context may be used again, or the error
/// that ended the world. `event`, if not null, gets the sequence, the waiting time and whether the path was zero-copy.
void complete(Context& context, const Request& request, CollectiveEvent* event);
/// Serves the other ranks' operations until all ranks have joined. `patience` is the timeout of each. Returns the rank
/// that joined last.
int join(Context& context, std::chrono::milliseconds patience);
/// Runs the operation on which all ranks have agreed.
void execute(Context& context, const Request& request, CollectiveEvent* event);

// Rounds. At the beginning of every operation, each rank publishes its description in a slot of its own and reads all
// others', so that all come to the same decision before any result is delivered. Small payloads are sent with the
// descriptions. The functions run on all ranks, on the thread that runs operations.

/// Publishes this rank's description of the next operation. Throws the error that ended the world.
void announce(Context& context, const Request& request);
/// Publishes that this rank has joined, so that it serves the others' next operation.
void announce_joined(Context& context, std::int64_t ticket);
/// Blocks until all ranks have announced. Returns false after about `patience`; does not sleep.
bool await_peers(Context& context, std::chrono::microseconds patience);
/// Blocks until all ranks have announced, and sleeps if that takes long. Returns false at `limit`. Throws the error
/// that ends the world meanwhile.
bool await_peers(Context& context, std::chrono::steady_clock::time_point limit);
/// Collects all announcements in the context's `agreement`. Throws the error that ends the world meanwhile.
void gather(Context& context);
/// The disagreement of the ranks, as this rank reports it; nullopt if they agree.
std::optional<Disagreement> disagreement(const Context& context);

/// Decides whether payloads of the request are sent inline; all ranks decide alike.
void choose_inline(Context& context, const Request& request) noexcept;
/// Writes the location of the request's memory in the descriptor, so that peers can access that memory.
void note_memory(const Context& context, const Request& request, Descriptor& own);
/// Publishes the descriptor that is in this rank's slot. `with`: the request whose input is sent inline, or null.
void publish_descriptor(Context& context, const Request* with);
/// Counts of an all_to_all_v: the elements that `from` sends to each rank, followed by those that it expects from each.
const std::int64_t* counts_of(const Context& context, int from) noexcept;
void check_room_for_counts(const Context& context);

/// Folds the context's `fold_inputs` in pieces, and checks between pieces whether the world has ended.
void fold_pieces(Context& context, std::int64_t count, Stores stores = Stores::Cached);

// Reductions on one host, after all ranks agree: each method is a function. All run on all ranks, also on those that
// have joined: they do their part of the work, but have no input and output. All methods fold elements by ascending
// rank, so all give the same bits.

// all_reduce and reduce:
/// Each rank that gets the result folds all of it, from the inline inputs.
void reduce_inline(Context& context, const Request& request);
/// Each rank folds its slice, from all ranks' registered inputs to the outputs of all ranks that get the result.
void reduce_zero_copy(Context& context, const Request& request);
/// Runs an all_reduce whose outputs are all registered, but not all of its inputs.
void all_reduce_by_output(Context& context, const Request& request);
/// Runs an all_reduce of other memory, which is read through the kernel.
void all_reduce_cross(Context& context, const Request& request);
/// In a world of two, each rank stages its whole input, and a rank that gets the result folds both.
void reduce_exchanged(Context& context, const Request& request);
/// Reduces chunk by chunk through the buffers. `cross`: inputs are read through the kernel instead of staged.
void reduce_chunked(Context& context, const Request& request, bool cross);

// reduce_scatter:
void reduce_scatter_inline(Context& context, const Request& request);
/// Reduces from the peers' memory, in place or through the kernel. No rank may write its input before all have done so.
void reduce_scatter_direct(Context& context, const Request& request);
void reduce_scatter_chunked(Context& context, const Request& request);

// Operations on one host that only move data, after all ranks agree. They differ only in which bytes of a rank's input
// another rank receives (`block_of`); the methods of moving are the same for all. The functions run on all ranks.

/// The bytes of rank `source`'s input that rank `target` receives: offset in the input, offset in the output, and size.
struct MovedBlock {
  std::size_t from = 0;
  std::size_t to = 0;
  std::size_t bytes = 0;
};
MovedBlock block_of(const Context& context, const Request& request, int source, int target);
std::size_t largest_block(const Context& context, const Request& request);

/// Each rank copies its blocks from the inline inputs.
void move_inline(Context& context, const Request& request);
/// Each rank copies its blocks from the sources' memory.
void move_direct(Context& context, const Request& request);
/// Moves chunk by chunk through the staging buffers.
void move_chunked(Context& context, const Request& request);

// Parts of an operation of a larger world (comm/hosts). All ranks of the host do the same parts in the same order. They
// announce their inputs once (`meet`); after that, only counters show when a peer has staged, lent or read memory. Only
// `run_part` announces again. The functions run on all ranks of the host, on the thread that runs the operation.

/// Exchanges the ranks' descriptions. `request` is null if the rank has joined. `with_input`: the request has no input,
/// or the input of a reduction that is sent inline, for `fold_inline`. The result is valid until the next call.
const Agreement& meet(Context& context, const Descriptor& own, const Request* request, bool with_input);
/// Folds the inline inputs of all ranks, on rank 0, to `part.output`.
void fold_inline(Context& context, const Request& part);
/// Copies `data` of `root` to all ranks, through the root's buffers. The other ranks wait only for the root.
void hand_out(Context& context, int root, void* data, std::size_t bytes);
/// Runs a reduce_scatter_v. `begin`: the element of the announced inputs at which this part's inputs begin; not set for
/// memory that was not announced.
void reduce_scatter_part(Context& context, const Request& part, std::optional<std::int64_t> begin);
/// Runs an all_gather_v. Returns the number to pass to `wait_until_read` before the input is written again; 0 if no
/// wait is necessary.
std::uint64_t all_gather_part(Context& context, const Request& part);
void wait_until_read(Context& context, std::uint64_t number);
/// Runs any other operation, on any memory. Announces it like an operation of a world on one host.
void run_part(Context& context, const Request& part);

}  // namespace cohort::comm::local
