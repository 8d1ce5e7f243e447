// Small helpers of the engine: positions in buffers of elements. Pure; any thread.
#pragma once

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

}  // namespace cohort::comm::hosts
