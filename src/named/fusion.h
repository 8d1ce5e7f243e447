// Which operations that have become ready together are carried out together. A pure function of replicated values, so
// all ranks plan alike. Fusing never changes bits: the core folds each element by ascending rank wherever it lies.
#pragma once

#include "named/match.h"

#include <cstddef>
#include <span>
#include <vector>

namespace cohort::named {

/// Larger tensors of the host gain nothing from being copied together (and the core would not): they go alone. Those of
/// GPUs are not copied: a batch of any sizes is one operation of NCCL.
inline constexpr std::size_t kFusedTensor = std::size_t{64} << 10;

/// Indices into the operations that were planned; one batch is one call of the communicator.
using Batch = std::vector<std::size_t>;

/// all_reduces of equal dtype, op and scales, and broadcasts of equal dtype and root, on one kind of device, go
/// together, up to `threshold` bytes per batch, also past others that stand between them. Batches are in the order of
/// their first operations.
std::vector<Batch> plan_fusion(std::span<const AgreedPtr> ready, std::size_t threshold);

}  // namespace cohort::named
