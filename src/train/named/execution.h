// Factors and averages of integers, which the communicator leaves to its callers. Pure; any thread. Integer types only.
// What a rank that has joined brings to reductions: elements that change no result. Pure; any thread.
#pragma once

#include "train/named/request.h"

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

/// Fills `to` with the neutral element of `op`: negative zero for sums of floating types (x + -0 is x to the bit, also
/// where x is -0), infinities for minima and maxima, one, all bits. Average: as Sum. The type has the reduction. It is
/// neutral once it has been multiplied by `prescale`, which is 1 for products and not 0 for minima and maxima.
void fill_neutral(Buffer to, ReduceOp op, double prescale = 1);

}  // namespace cohort::named
