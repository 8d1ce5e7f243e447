// Copies from a GPU's memory into the same GPU's. Any thread.
#pragma once

#include "comm/cuda/driver.h"

#include <cstddef>

namespace cohort::comm::cuda {

/// As work of the stream. Throws Internal.
void copy_within(const Gpu& gpu, void* to, const void* from, std::size_t bytes, Stream stream);

}  // namespace cohort::comm::cuda
