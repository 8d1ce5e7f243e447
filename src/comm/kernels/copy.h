// Copying of memory with a choice of how it is written. Pure functions over memory that the caller owns; any thread.
#pragma once

#include "comm/kernels/fold.h"

#include <cstddef>

namespace cohort::comm {

/// `to` and `from` are disjoint, of any alignment.
void copy(void* to, const void* from, std::size_t bytes, Stores stores);

}  // namespace cohort::comm
