// Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/finite.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/finite.h"

#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
static HWY_INLINE bool reaches(const T* element, T limit) {
  T bits;  // elements need not be aligned
  std::memcpy(&bits, element, sizeof bits);
  return static_cast<T>(bits & (std::numeric_limits<T>::max() >> 1)) >= limit;
}

// A maximum over a block says whether it is worth a closer look: two instructions for each vector, and no branch.
template <class T>
static HWY_INLINE std::size_t first_of(const T* bits, std::size_t count, T limit) {
  const hn::ScalableTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto without_sign = hn::Set(d, static_cast<T>(std::numeric_limits<T>::max() >> 1));
  const auto too_large = hn::Set(d, static_cast<T>(limit - 1));
  constexpr std::size_t kBlockVectors = 64;  // a multiple of the four maxima
  const std::size_t block = kBlockVectors * lanes;
  std::size_t i = 0;
  for (; i + block <= count; i += block) {
    auto a = hn::Zero(d);
    auto b = a;
    auto c = a;
    auto e = a;
    for (std::size_t j = 0; j < block; j += 4 * lanes) {
      a = hn::Max(a, hn::And(without_sign, hn::LoadU(d, bits + i + j)));
      b = hn::Max(b, hn::And(without_sign, hn::LoadU(d, bits + i + j + lanes)));
      c = hn::Max(c, hn::And(without_sign, hn::LoadU(d, bits + i + j + 2 * lanes)));
      e = hn::Max(e, hn::And(without_sign, hn::LoadU(d, bits + i + j + 3 * lanes)));
    }
    const auto largest = hn::Max(hn::Max(a, b), hn::Max(c, e));
    if (!hn::AllTrue(d, hn::Eq(hn::Max(largest, too_large), too_large))) break;
  }
  // The block that has it, or the vectors that fill no block.
  for (; i + lanes <= count; i += lanes) {
    const auto vector = hn::And(without_sign, hn::LoadU(d, bits + i));
    if (!hn::AllTrue(d, hn::Eq(hn::Max(vector, too_large), too_large))) break;
  }
  while (i < count && !reaches(bits + i, limit)) ++i;
  return i;
}

std::size_t first_of_16(const std::uint16_t* bits, std::size_t count, std::uint16_t limit) {
  return first_of(bits, count, limit);
}
std::size_t first_of_32(const std::uint32_t* bits, std::size_t count, std::uint32_t limit) {
  return first_of(bits, count, limit);
}
std::size_t first_of_64(const std::uint64_t* bits, std::size_t count, std::uint64_t limit) {
  return first_of(bits, count, limit);
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {

HWY_EXPORT(first_of_16);
HWY_EXPORT(first_of_32);
HWY_EXPORT(first_of_64);

std::size_t first_reaching(const std::uint16_t* bits, std::size_t count, std::uint16_t limit) {
  return HWY_DYNAMIC_DISPATCH(first_of_16)(bits, count, limit);
}
std::size_t first_reaching(const std::uint32_t* bits, std::size_t count, std::uint32_t limit) {
  return HWY_DYNAMIC_DISPATCH(first_of_32)(bits, count, limit);
}
std::size_t first_reaching(const std::uint64_t* bits, std::size_t count, std::uint64_t limit) {
  return HWY_DYNAMIC_DISPATCH(first_of_64)(bits, count, limit);
}

bool has_non_finite(const void* data, std::int64_t count, DType dtype) {
  const auto reaches = [&]<class T>(T limit, std::int64_t parts) {
    const auto all = static_cast<std::size_t>(count * parts);
    return first_reaching(static_cast<const T*>(data), all, limit) != all;
  };
  switch (dtype) {
    case DType::Float16: return reaches(kInfiniteFloat16, 1);
    case DType::BFloat16: return reaches(kInfiniteBFloat16, 1);
    case DType::Float32: return reaches(kInfiniteFloat32, 1);
    case DType::Float64: return reaches(kInfiniteFloat64, 1);
    case DType::Complex64: return reaches(kInfiniteFloat32, 2);
    case DType::Complex128: return reaches(kInfiniteFloat64, 2);
    default: return false;
  }
}

}  // namespace cohort::comm
#endif
