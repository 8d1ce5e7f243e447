// Operations on one host that only move data, once all ranks agree: what differs between them is which bytes of a
// rank's input another one receives (`block_of`); how they travel is the same for all. The functions run on all ranks.
#pragma once

#include "comm/local/context.h"
#include "comm/request.h"

#include <cstddef>

namespace cohort::comm::local {

/// Bytes of rank `source`'s input that rank `target` receives: where they lie there and go here.
struct MovedBlock {
  std::size_t from = 0;
  std::size_t to = 0;
  std::size_t bytes = 0;
};
MovedBlock block_of(const Context& context, const Request& request, int source, int target);
std::size_t largest_block(const Context& context, const Request& request);

/// Out of what came with the descriptors.
void move_inline(Context& context, const Request& request);
/// Everyone takes what it receives out of the sources' memory.
void move_direct(Context& context, const Request& request);
/// Chunk by chunk through the staging buffers.
void move_chunked(Context& context, const Request& request);

}  // namespace cohort::comm::local
