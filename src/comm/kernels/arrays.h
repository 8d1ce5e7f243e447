// Copies between ranks' memory, with the stores of the caller's choice. Pure functions over memory that the caller
// owns; any thread may call.
#pragma once

#include "comm/kernels/stores.h"

#include <cstddef>

namespace cohort::comm {

/// Copies `bytes` bytes; the two ranges must not overlap. Any alignment, any length. NonTemporal writes past the caches
/// what fills whole vectors, and is fenced: a flag stored afterwards (release) is seen after the data.
void copy(void* to, const void* from, std::size_t bytes, Stores stores);

/// The same for several pieces, with one fence after the last instead of one after each, which would wait for memory.
void copy_unfenced(void* to, const void* from, std::size_t bytes, Stores stores);
void fence(Stores stores);

}  // namespace cohort::comm
