// Small helpers of the engine over buffers of elements. They own nothing; any thread.
#pragma once

#include "comm/kernels/fold.h"

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>

namespace cohort::comm::hosts {

inline const std::byte* at(const void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}
inline std::byte* at(void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}

/// What a host does with what its ranks bring; an average divides once, at the end.
inline ReduceOp within_host(ReduceOp op) noexcept { return op == ReduceOp::Average ? ReduceOp::Sum : op; }

/// `to` = `factor` times `from`, rounded as a sum of one rank is.
inline void scale_by(double factor, DType dtype, const void* from, void* to, std::int64_t count) {
  FoldJob job;
  job.dtype = dtype;
  job.inputs = {&from, 1};
  job.outputs = {&to, 1};
  job.count = count;
  job.scales = {&factor, 1};
  fold(job);
}

}  // namespace cohort::comm::hosts
