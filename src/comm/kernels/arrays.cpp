// Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/copy.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#include "comm/kernels/copy.h"

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void copy_non_temporal(void* to, const void* from, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t vector = hn::Lanes(d);
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  // Whole cache lines: a line that is streamed in part costs a read of the memory.
  constexpr std::size_t kLine = 64;
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(target, source, head);
  std::size_t i = head;
  const std::size_t step = 4 * vector < kLine ? kLine : 4 * vector;
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
  for (; i + kLine <= bytes; i += kLine) {
    for (std::size_t j = 0; j < kLine; j += vector) hn::Stream(hn::LoadU(d, source + i + j), d, target + i + j);
  }
  std::memcpy(target + i, source + i, bytes - i);
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

}  // namespace cohort::comm
#endif
