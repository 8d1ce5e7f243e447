// float32 to bfloat16 and back, for data on the wire. Rounds to nearest, ties to even; denormals are kept and any NaN
// becomes the one NaN, so all instruction sets give the same bits. Pure functions over memory that the caller owns; any
// thread may call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cohort::comm {

/// Any alignment, any length. The two ranges share no byte.
void narrow_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count);
void widen_from_bfloat16(const std::uint16_t* from, float* to, std::size_t count);
/// What narrowing and widening make of the values, in place.
void round_to_bfloat16(float* values, std::size_t count);

}  // namespace cohort::comm
