// Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/arrays.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#include "comm/kernels/arrays.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void copy_non_temporal(void* to, const void* from, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t vector = hn::Lanes(d);
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  // Streams only whole cache lines, since a line that is streamed in part costs a read of the memory.
  constexpr std::size_t kLine = 64;
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(target, source, head);
  std::size_t i = head;
  const std::size_t step = std::max(kLine, 4 * vector);
  for (; i + step <= bytes; i += step) {
    for (std::size_t j = 0; j < step; j += 4 * vector) {
      const auto a = hn::LoadU(d, source + i + j);
      const auto b = hn::LoadU(d, source + i + j + vector);
      const auto c = hn::LoadU(d, source + i + j + 2 * vector);
      const auto e = hn::LoadU(d, source + i + j + 3 * vector);
      hn::Stream(a, d, target + i + j);
      hn::Stream(b, d, target + i + j + vector);
      hn::Stream(c, d, target + i + j + 2 * vector);
      hn::Stream(e, d, target + i + j + 3 * vector);
    }
  }
  const std::size_t least = std::max(kLine, vector);  // vectors of SVE may be longer than a line
  for (; i + least <= bytes; i += least) {
    for (std::size_t j = 0; j < least; j += vector) hn::Stream(hn::LoadU(d, source + i + j), d, target + i + j);
  }
  std::memcpy(target + i, source + i, bytes - i);
}

using DU = hn::ScalableTag<std::uint32_t>;
using DF = hn::RebindToFloat<DU>;
using DH = hn::Rebind<std::uint16_t, DU>;

// Rounds in integers, since the conversion instructions flush denormals in every mode.
static HWY_INLINE hn::Vec<DU> rounded(hn::Vec<DU> bits) {
  const DU d;
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1u));
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7FFFu))));
  const auto is_nan = hn::RebindMask(d, hn::IsNaN(hn::BitCast(DF(), bits)));
  return hn::IfThenElse(is_nan, hn::Set(d, 0x7FC0u), nearest);
}

static HWY_INLINE hn::Vec<DU> load(const float* from) { return hn::BitCast(DU(), hn::LoadU(DF(), from)); }

void narrow(const float* from, std::uint16_t* to, std::size_t count) {
  const std::size_t lanes = hn::Lanes(DU());
  const hn::RebindToSigned<DU> di;  // no value is negative, so demoting saturates nothing
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto words = hn::BitCast(di, rounded(load(from + i)));
    hn::StoreU(hn::DemoteTo(DH(), words), DH(), to + i);
  }
  if (i == count) return;
  HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)] = {};
  HWY_ALIGN std::uint16_t result[HWY_MAX_BYTES / sizeof(float)];
  std::memcpy(padded, from + i, (count - i) * sizeof(float));
  hn::StoreU(hn::DemoteTo(DH(), hn::BitCast(di, rounded(load(padded)))), DH(), result);
  std::memcpy(to + i, result, (count - i) * sizeof(std::uint16_t));
}

void widen(const std::uint16_t* from, float* to, std::size_t count) {
  const std::size_t lanes = hn::Lanes(DU());
  const auto wide = [](const std::uint16_t* source) HWY_ATTR {
    return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(DH(), source))));
  };
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(wide(from + i), DF(), to + i);
  if (i == count) return;
  HWY_ALIGN std::uint16_t padded[HWY_MAX_BYTES / sizeof(float)] = {};
  HWY_ALIGN float result[HWY_MAX_BYTES / sizeof(float)];
  std::memcpy(padded, from + i, (count - i) * sizeof(std::uint16_t));
  hn::StoreU(wide(padded), DF(), result);
  std::memcpy(to + i, result, (count - i) * sizeof(float));
}

template <class T>
static HWY_INLINE bool reaches(const T* element, T limit) {
  T bits;  // elements need not be aligned
  std::memcpy(&bits, element, sizeof bits);
  return static_cast<T>(bits & (std::numeric_limits<T>::max() >> 1)) >= limit;
}

// Computes a maximum over each block first, to see whether the block has such an element. That takes two instructions
// for each vector, and no branch.
template <class T>
static HWY_INLINE std::size_t first_of(const T* bits, std::size_t count, T limit) {
  const hn::ScalableTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto without_sign = hn::Set(d, static_cast<T>(std::numeric_limits<T>::max() >> 1));
  const auto too_large = hn::Set(d, static_cast<T>(limit - 1));
  constexpr std::size_t kBlockVectors = 64;  // a multiple of 4: the loop below has four maxima
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
  // Searches the block that has the element, or the vectors after the last whole block.
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

HWY_EXPORT(copy_non_temporal);

void copy_unfenced(void* to, const void* from, std::size_t bytes, Stores stores) {
  if (bytes == 0) return;
  if (stores == Stores::Cached) {
    std::memcpy(to, from, bytes);
  } else {
    HWY_DYNAMIC_DISPATCH(copy_non_temporal)(to, from, bytes);
  }
}

void fence(Stores stores) {
  if (stores == Stores::NonTemporal) hwy::FlushStream();
}

void copy(void* to, const void* from, std::size_t bytes, Stores stores) {
  copy_unfenced(to, from, bytes, stores);
  fence(stores);
}

HWY_EXPORT(narrow);
HWY_EXPORT(widen);

void narrow_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(narrow)(from, to, count);
}
void widen_from_bfloat16(const std::uint16_t* from, float* to, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(widen)(from, to, count);
}

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
