// Which collectives NCCL carries out, and how each is given to it. Pure, but for the calls of NCCL; any thread.
#pragma once

#include "comm/cuda/driver.h"
#include "comm/cuda/nccl.h"
#include "comm/request.h"

#include <optional>

namespace cohort::comm::cuda {

/// A reduction that NCCL has, but for the order in which elements are folded: not those of types it lacks, nor bit
/// operations, factors, and weights but those of an all_reduce; nor the minimum of floats, which it does not make NaN
/// where a rank brings NaN, nor the average of integers, whose rounding it does not promise.
bool has_sum(const Request& request) noexcept;
/// An operation that moves data, of whatever type.
bool has_move(Kind kind) noexcept;

struct NcclWorld {
  const Nccl& nccl;
  NcclComm comm = nullptr;
  Stream stream = nullptr;
  int rank = 0;
  int size = 1;
  /// This rank's share of a weighted average, whose inputs are multiplied by it. 0: its output is zero already, and
  /// what it brings.
  std::optional<double> share = {};
};
/// Gives it to NCCL; between ncclGroupStart and ncclGroupEnd.
NcclResult launch(const NcclWorld& world, const Request& request);
/// Whether NCCL multiplies elements of this type by a share as precisely as is promised: it would be rounded to halves.
bool has_shares(DType dtype) noexcept;

}  // namespace cohort::comm::cuda
