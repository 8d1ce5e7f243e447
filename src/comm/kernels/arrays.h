// Passes over whole arrays besides reductions: copies with the stores that the caller chooses, conversion between
// float32 and bfloat16 for data on the wire, and the search for elements that are not finite. Pure functions over
// memory that the caller owns; any thread may call.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>

namespace cohort::comm {

/// Kinds of stores with which kernels write their results. All write the same bytes.
enum class Stores : std::uint8_t {
  Cached,       ///< ordinary stores
  NonTemporal,  ///< past the caches, for memory that a distant core reads next or that does not fit; fenced on return
};

/// Copies `bytes` bytes; the two ranges must not overlap. Any alignment, any length. NonTemporal writes whole vectors
/// past the caches and ends with a fence: a flag stored afterwards (release) is seen after the data.
void copy(void* to, const void* from, std::size_t bytes, Stores stores);

/// Copies without a fence. Several pieces need only one `fence`, after the last, since each fence waits for memory.
void copy_unfenced(void* to, const void* from, std::size_t bytes, Stores stores);
void fence(Stores stores);

// Conversions to bfloat16 round to nearest, ties to even. Denormals are kept and any NaN becomes the one NaN, so all
// instruction sets give the same bits.

/// Converts arrays of any alignment and length. The two ranges share no byte.
void narrow_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count);
void widen_from_bfloat16(const std::uint16_t* from, float* to, std::size_t count);

// Search for the first element whose bits, without the sign, reach a limit. With the limit of its type, that is the
// first NaN or infinity. Compares integers, so that neither the thread's floating-point mode nor denormals matter.

// Bits of an infinity, as limits; larger bits are a NaN.
constexpr std::uint16_t kInfiniteFloat16 = 0x7C00;
constexpr std::uint16_t kInfiniteBFloat16 = 0x7F80;
constexpr std::uint32_t kInfiniteFloat32 = 0x7F800000;
constexpr std::uint64_t kInfiniteFloat64 = 0x7FF0000000000000;
/// The smallest float32 that rounds to an infinite bfloat16: half a step above the largest finite bfloat16, since that
/// tie rounds up.
constexpr std::uint32_t kInfiniteAsBFloat16 = 0x7F7F8000;

/// True if an element, or a component of a complex element, is NaN or infinite. Always false for integers.
bool has_non_finite(const void* data, std::int64_t count, DType dtype);

/// Returns the position of the first element that reaches the limit, or `count`. Any alignment, any length.
std::size_t first_reaching(const std::uint16_t* bits, std::size_t count, std::uint16_t limit);
std::size_t first_reaching(const std::uint32_t* bits, std::size_t count, std::uint32_t limit);
std::size_t first_reaching(const std::uint64_t* bits, std::size_t count, std::uint64_t limit);

}  // namespace cohort::comm
