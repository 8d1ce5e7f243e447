// Collectives of a GPU's memory that go by way of host memory in pieces, and those of a world of one, which stay on the
// GPU. One thread at a time.
#pragma once

#include "comm/cuda/chunking.h"
#include "comm/cuda/ring.h"
#include "comm/cuda/staging.h"
#include "comm/pieces.h"

#include <memory>

namespace cohort::comm::cuda {

/// The operation that `cut` cuts, through `ring`, whose slots have room for a piece.
std::shared_ptr<Pieces> in_pieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut,
                                  std::shared_ptr<Ring> ring, int rank);

/// Whether a world of one has nothing to do but to copy.
bool is_copy(const Request& request) noexcept;
/// Such a copy, which has begun.
std::shared_ptr<Pieces> copy_alone(Gpu& gpu, const Request& request, StreamMarks marks);

}  // namespace cohort::comm::cuda
