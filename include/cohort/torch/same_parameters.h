// Checks that all ranks hold the same parameters, to the bit, and notes digests by which runs are compared. A memory
// error, a library that is not deterministic or a step that only one rank took lets replicas drift apart, which nothing
// else reports. Owns nothing; one thread at a time per communicator.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

#include <cstdint>
#include <string>
#include <vector>

namespace cohort {

namespace track {
class RunRecord;
}

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct SameParametersOptions {
  /// Number of synchronised steps so far, for the message. -1: the message does not mention steps.
  std::int64_t step = -1;
};

/// Collective; waits. Compares the bytes of dense tensors of any type over all ranks by 128-bit digests (see
/// <cohort/digest.h>: a difference of one bit goes unnoticed with a probability below 2^-66). Reads each tensor once,
/// and sends 64 bytes. Ranks that have joined (Communicator::join) are left out. All ranks give tensors of the same
/// shapes and types in the same order.
///
/// Throws Mismatch on every rank, with the same text, if there is a difference. The text names the first tensor that
/// differs, the ranks that differ from most of the others, and, for the lowest of these, its host, the first differing
/// element and both values. If two ranks, or two halves, differ, both are named, since neither is known to be right.
/// `context().peer` is the lowest differing rank. The communicator stays usable.
void require_same_parameters(Communicator& comm, const std::vector<NamedTensor>& tensors,
                             const SameParametersOptions& options = {});

/// Appends digests of the tensors after `step` to a run's record, for `cohort runs compare`: see
/// track::RunRecord::write_weights. Not collective; rank 0, whose record it is, calls it. Throws InvalidArgument if a
/// tensor is not dense.
void write_weights(track::RunRecord& record, std::int64_t step, const std::vector<NamedTensor>& tensors);

}  // namespace cohort
