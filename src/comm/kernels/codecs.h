// Formats in which float32 travels between hosts (WireFormat): blocks of elements, each with a scale, as bytes. Pure
// functions over memory that the caller owns; any thread may call. All dispatch targets give the same bytes and values,
// whatever the thread's floating-point mode.
//
//   Int8        scale (float32), then a code of 8 bits for each element, two's complement
//   Int4        scale (bfloat16), then two codes in a byte: of n elements, number i in the lower half of byte i and
//               number i + (n + 1) / 2 in its upper half
//   Float8E4M3  scale (float32), then a code for each element: sign, 4 bits of exponent, 3 of mantissa
//
// An element is its code times the scale, rounded to float32. The scale is the largest magnitude of the block over the
// largest code (127, 7, 448), of Int4 rounded up; codes are rounded to nearest, ties to even. A block below 2^-100 is
// zero. A negative scale marks a block with NaN or infinities: those are the largest codes but one as they stand (with
// their signs) and the code beyond, and the other elements have the codes below.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>

namespace cohort::comm {

/// Elements that share a scale; 1 where there are no blocks.
std::size_t block_of(WireFormat format) noexcept;
/// Size of `count` encoded elements, of which the last block may have fewer.
std::size_t encoded_bytes(WireFormat format, std::size_t count) noexcept;

/// Any alignment, any length; blocks begin with the first element. The ranges share no byte. With `residual`, as many
/// floats, which goes with formats that have scales: `unit` times its values are added first, and then it is what
/// encoding has lost, over `unit`. Values that are not finite leave none.
void encode(WireFormat format, const float* from, std::byte* to, std::size_t count, float* residual = nullptr,
            float unit = 1);
/// Takes any bytes.
void decode(WireFormat format, const std::byte* from, float* to, std::size_t count);
/// Changes the values as encoding and decoding them does, in place.
void round_trip(WireFormat format, float* values, std::size_t count, float* residual = nullptr, float unit = 1);

}  // namespace cohort::comm
