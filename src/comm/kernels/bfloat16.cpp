// Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/bfloat16.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/bfloat16.h"

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DU = hn::ScalableTag<std::uint32_t>;
using DF = hn::RebindToFloat<DU>;
using DH = hn::Rebind<std::uint16_t, DU>;

// In integers: the conversion instructions flush denormals, whatever the mode says.
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
  const hn::RebindToSigned<DU> di;  // none is negative, so that demoting saturates nothing
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

void round_all(float* values, std::size_t count) {
  const std::size_t lanes = hn::Lanes(DU());
  const auto through = [](const float* from)
                           HWY_ATTR { return hn::BitCast(DF(), hn::ShiftLeft<16>(rounded(load(from)))); };
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(through(values + i), DF(), values + i);
  if (i == count) return;
  HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(padded, values + i, (count - i) * sizeof(float));
  hn::StoreU(through(padded), DF(), padded);
  std::memcpy(values + i, padded, (count - i) * sizeof(float));
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {

HWY_EXPORT(narrow);
HWY_EXPORT(widen);
HWY_EXPORT(round_all);

void narrow_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(narrow)(from, to, count);
}
void widen_from_bfloat16(const std::uint16_t* from, float* to, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(widen)(from, to, count);
}
void round_to_bfloat16(float* values, std::size_t count) { HWY_DYNAMIC_DISPATCH(round_all)(values, count); }

}  // namespace cohort::comm
#endif
