// Reductions on one host, once all ranks agree: each way is a function. All run on all ranks, also on those that have
// joined, which take their part of the work but bring and get nothing. Elements are folded by ascending rank whatever
// the way, so all give the same bits.
#pragma once

#include "comm/local/context.h"
#include "comm/request.h"

namespace cohort::comm::local {

// all_reduce.cpp: all_reduce and reduce
/// Who gets the result folds all of it, out of what came with the descriptors.
void reduce_inline(Context& context, const Request& request);
/// Each rank folds its slice straight out of all ranks' registered memory into that of all who get the result.
void reduce_zero_copy(Context& context, const Request& request);
/// all_reduce whose outputs are registered, not all of the inputs.
void all_reduce_by_output(Context& context, const Request& request);
/// all_reduce of other memory, read through the kernel.
void all_reduce_cross(Context& context, const Request& request);
/// Two ranks stage all they bring, and who gets the result folds both.
void reduce_exchanged(Context& context, const Request& request);
/// Chunk by chunk through the buffers. `cross`: inputs are read through the kernel instead.
void reduce_chunked(Context& context, const Request& request, bool cross);

// reduce_scatter.cpp
void reduce_scatter_inline(Context& context, const Request& request);
/// Out of the peers' memory, in place or through the kernel. They may not write it before all have done that.
void reduce_scatter_direct(Context& context, const Request& request);
void reduce_scatter_chunked(Context& context, const Request& request);

}  // namespace cohort::comm::local
