// What the ranks of a host do for an operation of a larger world (comm/hosts): all the same parts in the same order.
// They say once what they bring (`meet`), and after that counters alone tell when a peer has staged, borrowed or read
// something; only `run_part` negotiates again. The functions run on all ranks of the host, on the thread that runs the
// operation.
#pragma once

#include "comm/local/context.h"
#include "comm/request.h"

#include <cstddef>
#include <cstdint>
#include <optional>

namespace cohort::comm::local {

/// All ranks learn what the others bring. `request` null: the rank has joined. `with_input`: there is no input, or it
/// is one of a reduction and has room inline, for `fold_inline`. Valid until the next call.
const Agreement& meet(Context& context, const Descriptor& own, const Request* request, bool with_input);
/// Rank 0, to `part.output`: what all brought inline.
void fold_inline(Context& context, const Request& part);
/// From `root` to all, through its buffers: the others wait for nobody else.
void hand_out(Context& context, int root, void* data, std::size_t bytes);
/// A reduce_scatter_v. `begin`: it is of the operation's inputs from this element on; else of other memory.
void reduce_scatter_part(Context& context, const Request& part, std::optional<std::int64_t> begin);
/// An all_gather_v. Gives what `wait_until_read` has to be asked for before the input is written again; 0: nothing.
std::uint64_t all_gather_part(Context& context, const Request& part);
void wait_until_read(Context& context, std::uint64_t number);
/// Any other operation, in which memory may lie anywhere: it is announced like one of this host alone.
void run_part(Context& context, const Request& part);

}  // namespace cohort::comm::local
