// What a rank that has joined brings to reductions: elements that change no result. Pure; any thread.
#pragma once

#include <cohort/buffer.h>

namespace cohort::named {

/// Fills `to` with the neutral element of `op`: negative zero for sums of floating types (x + -0 is x to the bit, also
/// where x is -0), infinities for minima and maxima, one, all bits. Average: as Sum. The type has the reduction. It is
/// neutral once it has been multiplied by `prescale`, which is 1 for products and not 0 for minima and maxima.
void fill_neutral(Buffer to, ReduceOp op, double prescale = 1);


}  // namespace cohort::named
