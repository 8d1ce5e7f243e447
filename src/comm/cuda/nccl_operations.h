// Which collectives NCCL carries out, and how each is given to it. Pure, but for the calls of NCCL; any thread.
#pragma once

#include "comm/cuda/driver.h"
#include "comm/cuda/nccl.h"
#include "comm/request.h"

namespace cohort::comm::cuda {

/// A reduction that NCCL has, but for the order in which elements are folded: not those of types it lacks, nor bit
/// operations, weights and factors; nor the minimum of floats, which it does not make NaN where a rank brings NaN, nor
/// the average of integers, whose rounding it does not promise.
bool has_sum(const Request& request) noexcept;
/// An operation that moves data, of whatever type.
bool has_move(Kind kind) noexcept;

struct NcclWorld {
  const Nccl& nccl;
  NcclComm comm = nullptr;
  Stream stream = nullptr;
  int rank = 0;
  int size = 1;
};
/// Gives it to NCCL; between ncclGroupStart and ncclGroupEnd.
NcclResult launch(const NcclWorld& world, const Request& request);

}  // namespace cohort::comm::cuda
