// Formats in which float32 is sent between hosts (WireFormat): blocks of elements, each block with a scale. Pure
// functions over memory that the caller owns; any thread may call. All dispatch targets give the same bytes and values,
// independently of the thread's floating-point mode.
//
//   Int8  scale (float32), then a code of 8 bits for each element, two's complement
//   Int4  scale (bfloat16), then two codes in a byte: of n elements, number i in the lower half of byte i and
//         number i + (n + 1) / 2 in its upper half
//
// An element is its code times the scale, rounded to float32. The scale is the largest magnitude of the block divided
// by the largest code (127, 7), rounded up for Int4. Codes are rounded to nearest, ties to even. A block with all
// magnitudes below 2^-100 is zero. A negative scale marks a block with NaN or infinities: in such a block the largest
// code, with its sign, is an infinity, the code beyond it is NaN, and the finite elements have smaller codes.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>

namespace cohort::comm {

/// Number of elements that share a scale; 1 for formats without blocks.
std::size_t block_of(WireFormat format) noexcept;
/// Size in bytes of `count` encoded elements; the last block may be shorter.
std::size_t encoded_bytes(WireFormat format, std::size_t count) noexcept;

/// Encodes. Any alignment, any length; blocks begin with the first element. The ranges share no byte. `residual`, for
/// formats with scales, is null or has `count` floats: `unit` times its values are added before encoding, and it is set
/// to what encoding has lost, divided by `unit`. Values that are not finite set it to 0.
void encode(WireFormat format, const float* from, std::byte* to, std::size_t count, float* residual = nullptr,
            float unit = 1);
/// Decodes. All bytes are valid.
void decode(WireFormat format, const std::byte* from, float* to, std::size_t count);
/// Changes the values in place, as encoding and decoding would.
void round_trip(WireFormat format, float* values, std::size_t count, float* residual = nullptr, float unit = 1);

}  // namespace cohort::comm
