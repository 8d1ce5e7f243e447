// Neighbours in a group of operations that are small and alike travel as one, in one buffer. Pure; any thread.
#pragma once

#include "comm/request.h"

#include <cstddef>
#include <span>

namespace cohort::comm {

/// No more than this travels as one.
inline constexpr std::size_t kFusedTotal = std::size_t{1} << 20;

/// How many of `requests`, from the first on, can travel as one; at least 1.
std::size_t fusible_run(std::span<const Request> requests) noexcept;

/// The operation that carries them out, in place in `buffer`, which has room for all their inputs and gets them here.
/// The counts of all are in its fingerprint, so ranks that group otherwise are refused.
Request fuse(std::span<const Request> requests, std::byte* buffer);
/// Gives each its result.
void unfuse(std::span<const Request> requests, const std::byte* buffer);

}  // namespace cohort::comm
