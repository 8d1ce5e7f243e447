// Factors and averages of integers, which the communicator leaves to its callers. Pure; any thread. Integer types only.
#pragma once

#include "named/request.h"

#include <cohort/buffer.h>

#include <cstdint>

namespace cohort::named {

/// Integers that are to be scaled, or averaged over some of the ranks: they are added up, and finished here.
bool by_hand(const Signature& common, bool skips_ranks) noexcept;

/// Divides by `divisor` (at least 1), rounding toward zero as the core's average does.
void divide(Buffer data, std::int64_t divisor);

/// Multiplies by `factor`, which is finite, and divides by `divisor`, in double precision; rounds toward zero, and to
/// the nearest value that the type holds. Does nothing if both are 1.
void scale(Buffer data, double factor, std::int64_t divisor = 1);

}  // namespace cohort::named
