// Which collectives NCCL carries out, and how each is given to it. Pure, but for the calls of NCCL; any thread.
#pragma once

#include "comm/cuda/driver.h"
#include "comm/cuda/exact_sums.h"
#include "comm/cuda/nccl.h"
#include "comm/request.h"

namespace cohort::comm::cuda {

/// A reduction that NCCL has, but for the order in which elements are folded: not those of types it lacks, nor bit
/// operations, factors, and weights but those of an all_reduce; nor the minimum of floats, which it does not make NaN
/// where a rank brings NaN, nor the average of integers, whose rounding it does not promise.
bool has_sum(const Request& request) noexcept;
/// An operation that moves data, of whatever type.
bool has_move(Kind kind) noexcept;

/// Sums of what each rank brings times its share of a weighted average, on a communicator: made before a group of
/// NCCL's operations, and there until NCCL has the group in its stream.
class ShareSums {
 public:
  ShareSums(const Nccl& nccl, NcclComm comm, double share) noexcept;
  ~ShareSums();
  ShareSums(const ShareSums&) = delete;
  ShareSums& operator=(const ShareSums&) = delete;

  /// Of making them.
  NcclResult result() const noexcept { return result_; }
  /// The communicator has gone, and they with it.
  void forget() noexcept { single_ = double_ = NcclOp::Sum; }
  double share() const noexcept { return share_; }
  /// Of a type that has_shares.
  NcclOp of(NcclType type) const noexcept { return type == NcclType::Float32 ? single_ : double_; }

 private:
  const Nccl& nccl_;
  const NcclComm comm_;
  const double share_;
  NcclOp single_ = NcclOp::Sum, double_ = NcclOp::Sum;
  NcclResult result_;
};

struct NcclWorld {
  const Nccl& nccl;
  NcclComm comm = nullptr;
  Stream stream = nullptr;
  int rank = 0;
  int size = 1;
  /// Of a weighted average. Where this rank's share is 0, its output is zero already, and what it brings.
  const ShareSums* shares = nullptr;
};
/// Gives it to NCCL; between ncclGroupStart and ncclGroupEnd.
NcclResult launch(const NcclWorld& world, const Request& request);
/// What is exchanged in the step, likewise.
NcclResult launch(const NcclWorld& world, const ExactStep& step);
/// Whether NCCL multiplies elements of this type by a share as precisely as is promised: it would be rounded to halves.
bool has_shares(DType dtype) noexcept;

}  // namespace cohort::comm::cuda
