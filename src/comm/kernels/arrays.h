// Passes over whole arrays between and beside reductions: copies with the stores of the caller's choice, float32 to
// bfloat16 and back for data on the wire, and the look for elements that are not finite. Pure functions over memory
// that the caller owns; any thread may call.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>

namespace cohort::comm {

/// How kernels write their results. The bytes written are the same.
enum class Stores : std::uint8_t {
  Cached,       ///< ordinary stores
  NonTemporal,  ///< past the caches, for memory that a distant core reads next or that does not fit; fenced on return
};

/// Copies `bytes` bytes; the two ranges must not overlap. Any alignment, any length. NonTemporal writes past the caches
/// what fills whole vectors, and is fenced: a flag stored afterwards (release) is seen after the data.
void copy(void* to, const void* from, std::size_t bytes, Stores stores);

/// The same for several pieces, with one fence after the last instead of one after each, which would wait for memory.
void copy_unfenced(void* to, const void* from, std::size_t bytes, Stores stores);
void fence(Stores stores);

// Rounds to nearest, ties to even; denormals are kept and any NaN becomes the one NaN, so all instruction sets give the
// same bits.

/// Any alignment, any length. The two ranges share no byte.
void narrow_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count);
void widen_from_bfloat16(const std::uint16_t* from, float* to, std::size_t count);
/// Rounds the values as narrowing and widening them does, in place.
void round_to_bfloat16(float* values, std::size_t count);

// The first element whose bits, without the sign, are not below a limit: with the limit of a type that is the first NaN
// or infinity. In integers, so that neither the thread's floating-point mode nor denormals matter.

// An infinity's bits; what is above them is NaN.
constexpr std::uint16_t kInfiniteFloat16 = 0x7C00;
constexpr std::uint16_t kInfiniteBFloat16 = 0x7F80;
constexpr std::uint32_t kInfiniteFloat32 = 0x7F800000;
constexpr std::uint64_t kInfiniteFloat64 = 0x7FF0000000000000;
/// The first float32 that rounds to an infinite bfloat16: half a step above the largest finite one, the tie going up.
constexpr std::uint32_t kInfiniteAsBFloat16 = 0x7F7F8000;

/// True if one of the elements is NaN or infinite, or a part of one; integers never are.
bool has_non_finite(const void* data, std::int64_t count, DType dtype);

/// The position of the first element that reaches the limit, or `count`. Any alignment, any length.
std::size_t first_reaching(const std::uint16_t* bits, std::size_t count, std::uint16_t limit);
std::size_t first_reaching(const std::uint32_t* bits, std::size_t count, std::uint32_t limit);
std::size_t first_reaching(const std::uint64_t* bits, std::size_t count, std::uint64_t limit);

}  // namespace cohort::comm
