// Compiled once per instruction set by foreach_target.h; the best one is chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/memory_kernels.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "bench/machine.h"

HWY_BEFORE_NAMESPACE();
namespace cohort::app::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <std::size_t kCount>
void Walk(float* HWY_RESTRICT data, std::size_t elements) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t part = elements / kCount / lanes * lanes;
  const auto one = hn::Set(d, 1.0F);
  for (std::size_t i = 0; i < part; i += lanes) {
    for (std::size_t stream = 0; stream < kCount; ++stream) {
      float* const at = data + stream * part + i;
      hn::StoreU(hn::Add(hn::LoadU(d, at), one), d, at);
    }
  }
}

void ReadAndWrite(void* data, std::size_t bytes, std::size_t streams) {
  float* const elements = static_cast<float*>(data);
  const std::size_t count = bytes / sizeof(float);
  switch (streams) {
    case 4: return Walk<4>(elements, count);
    case 8: return Walk<8>(elements, count);
    case 16: return Walk<16>(elements, count);
    default: return Walk<1>(elements, count);
  }
}

}  // namespace cohort::app::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::app::bench {

HWY_EXPORT(ReadAndWrite);

void read_and_write(void* data, std::size_t bytes, std::size_t streams) {
  HWY_DYNAMIC_DISPATCH(ReadAndWrite)(data, bytes, streams);
}

}  // namespace cohort::app::bench
#endif
