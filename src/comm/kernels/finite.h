// Looks for the first element whose bits, without the sign, are not below a limit: with the limit of a type that is the
// first NaN or infinity. In integers, so that neither the thread's floating-point mode nor denormals matter. Pure
// functions over memory that the caller owns; any thread may call.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>

namespace cohort::comm {

// An infinity's bits; what is above them is NaN.
constexpr std::uint16_t kInfiniteFloat16 = 0x7C00;
constexpr std::uint16_t kInfiniteBFloat16 = 0x7F80;
constexpr std::uint32_t kInfiniteFloat32 = 0x7F800000;
constexpr std::uint64_t kInfiniteFloat64 = 0x7FF0000000000000;
/// The first float32 that rounds to an infinite bfloat16: half a step above the largest finite one, the tie going up.
constexpr std::uint32_t kInfiniteAsBFloat16 = 0x7F7F8000;

/// Whether one of the elements is NaN or infinite, or a part of one; integers never are.
bool has_non_finite(const void* data, std::int64_t count, DType dtype);

/// The position of the first element that reaches the limit, or `count`. Any alignment, any length.
std::size_t first_reaching(const std::uint16_t* bits, std::size_t count, std::uint16_t limit);
std::size_t first_reaching(const std::uint32_t* bits, std::size_t count, std::uint32_t limit);
std::size_t first_reaching(const std::uint64_t* bits, std::size_t count, std::uint64_t limit);

}  // namespace cohort::comm
