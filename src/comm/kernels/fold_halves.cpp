// Kernels of float16 and bfloat16, which are widened to float32 exactly, folded there, and rounded once. A vector of
// these elements becomes two vectors of float32. Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/fold_halves.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/fold.h"
#include "comm/kernels/fold_loop.h"

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {

struct HalfCodec {
  using Element = std::uint16_t;
  using Accumulator = float;
  using D = hn::ScalableTag<std::uint16_t>;
  using Raw = hn::Vec<D>;
  using DF = hn::ScalableTag<float>;
  using F = hn::Vec<DF>;
#if HWY_ARCH_ARM && HWY_TARGET < HWY_NEON
  using Value = svfloat32x2_t;  // vectors of SVE cannot be members
  static HWY_INLINE Value pair(F a, F b) { return svcreate2_f32(a, b); }
  static HWY_INLINE F first(Value value) { return svget2_f32(value, 0); }
  static HWY_INLINE F second(Value value) { return svget2_f32(value, 1); }
#else
  struct Value {
    F a;
    F b;
  };
  static HWY_INLINE Value pair(F a, F b) { return {a, b}; }
  static HWY_INLINE F first(Value value) { return value.a; }
  static HWY_INLINE F second(Value value) { return value.b; }
#endif
  static constexpr bool kScalable = true;
  // Prefetches this many elements ahead. The processor does not run far enough ahead by itself, as it executes many
  // instructions per cache line: without prefetching, elements in memory are folded 1.2 times slower. Plain float32
  // gains nothing.
  static constexpr std::size_t kPrefetch = 2048 / sizeof(Element);
  using DU = hn::RebindToUnsigned<DF>;
  using U = hn::Vec<DU>;

  // Words of two elements, the one with even index in the lower half. With one lane there is no second element.
#if HWY_TARGET == HWY_SCALAR
  static HWY_INLINE U words(Raw raw) { return hn::PromoteTo(DU(), raw); }
  static HWY_INLINE Raw elements(U words) {
    return hn::DemoteTo(D(), hn::BitCast(hn::RebindToSigned<DF>(), hn::And(words, hn::Set(DU(), 0xFFFFu))));
  }
#else
  static HWY_INLINE U words(Raw raw) { return hn::BitCast(DU(), raw); }
  static HWY_INLINE Raw elements(U words) { return hn::BitCast(D(), words); }
#endif

  template <class Step>
  static HWY_INLINE Value fold(Value total, Value value) {
    return pair(Step::apply(first(total), first(value)), Step::apply(second(total), second(value)));
  }
  static HWY_INLINE Value multiply(Value value, float factor) {
    const F by = hn::Set(DF(), factor);
    return pair(hn::Mul(first(value), by), hn::Mul(second(value), by));
  }
  static HWY_INLINE Value divide(Value value, float divisor) {
    const F by = hn::Set(DF(), divisor);
    return pair(hn::Div(first(value), by), hn::Div(second(value), by));
  }
  static HWY_INLINE void one_nan(Value& value) { value = pair(only_nan(first(value)), only_nan(second(value))); }
  // Tests all four values together first, since NaN is rare and one comparison finds it in two vectors.
  static HWY_INLINE void one_nan(Value& a, Value& b, Value& c, Value& e) {
    const auto some = hn::Or(hn::Or(either_nan(a), either_nan(b)), hn::Or(either_nan(c), either_nan(e)));
    if (HWY_LIKELY(hn::AllFalse(DF(), some))) return;
    one_nan(a);
    one_nan(b);
    one_nan(c);
    one_nan(e);
  }

 private:
  static HWY_INLINE F only_nan(F value) {
    return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(DF(), hn::Set(DU(), 0x7FC00000u)), value);
  }
  static HWY_INLINE hn::Mask<DF> either_nan(Value value) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
    return hn::Mask<DF>{_mm512_cmp_ps_mask(value.a.raw, value.b.raw, _CMP_UNORD_Q)};
#elif HWY_TARGET == HWY_AVX2
    return hn::MaskFromVec(F{_mm256_cmp_ps(value.a.raw, value.b.raw, _CMP_UNORD_Q)});
#else
    return hn::Or(hn::IsNaN(first(value)), hn::IsNaN(second(value)));
#endif
  }
};

// Separates the elements with even and those with odd index, so that no element has to move to another lane.
struct BFloat16Codec : HalfCodec {
  static HWY_INLINE Value load(const Element* from) { return widen(hn::LoadU(D(), from)); }
  static HWY_INLINE Value widen(Raw raw) {
    const auto pairs = words(raw);
    return pair(hn::BitCast(DF(), hn::ShiftLeft<16>(pairs)),
                hn::BitCast(DF(), hn::And(pairs, hn::Set(DU(), 0xFFFF0000u))));
  }
  // Rounds in integers, since the conversions (VCVTNE2PS2BF16, VCVTNEPS2BF16) flush denormals in every mode.
  static HWY_INLINE Raw narrow(Value value) {
    const hn::RebindToUnsigned<DF> du;
    const auto rounded = [&](F x) HWY_ATTR {
      const auto bits = hn::BitCast(du, x);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
      const auto odd = hn::TestBit(bits, hn::Set(du, 0x10000u));
      return hn::Add(bits, hn::IfThenElse(odd, hn::Set(du, 0x8000u), hn::Set(du, 0x7FFFu)));
#else
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
      return hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
#endif
    };
    const auto even = hn::ShiftRight<16>(rounded(first(value)));
    return elements(hn::OrAnd(even, rounded(second(value)), hn::Set(du, 0xFFFF0000u)));
  }
};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
struct Float16Codec : HalfCodec {
  static HWY_INLINE Value load(const Element* from) {  // the conversion instructions read from memory
    const hn::Half<D> half;
    const hn::Rebind<hwy::float16_t, DF> dh;
    return {hn::PromoteTo(DF(), hn::BitCast(dh, hn::LoadU(half, from))),
            hn::PromoteTo(DF(), hn::BitCast(dh, hn::LoadU(half, from + hn::Lanes(half))))};
  }
  static HWY_INLINE Value widen(Raw raw) {
    const hn::Half<D> half;
    const hn::Rebind<hwy::float16_t, DF> dh;
    return {hn::PromoteTo(DF(), hn::BitCast(dh, hn::LowerHalf(half, raw))),
            hn::PromoteTo(DF(), hn::BitCast(dh, hn::UpperHalf(half, raw)))};
  }
  static HWY_INLINE Raw narrow(Value value) {
    const hn::Half<D> half;
    const hn::Rebind<hwy::float16_t, DF> dh;
    return hn::Combine(D(), hn::BitCast(half, hn::DemoteTo(dh, value.b)), hn::BitCast(half, hn::DemoteTo(dh, value.a)));
  }
};
#else
// Converts as in F. Giesen, "Half to float done quick", and its inverse (public domain), since Highway's own
// conversions truncate and do not handle infinities. Separates even and odd index, as above.
struct Float16Codec : HalfCodec {
  static HWY_INLINE Value load(const Element* from) { return widen(hn::LoadU(D(), from)); }
  static HWY_INLINE Value widen(Raw raw) {
    const auto pairs = words(raw);
    return pair(widen_low(hn::And(pairs, hn::Set(DU(), 0xFFFFu))), widen_low(hn::ShiftRight<16>(pairs)));
  }
  static HWY_INLINE Raw narrow(Value value) {
    return elements(hn::Or(narrow_low(first(value)), hn::ShiftLeft<16>(narrow_low(second(value)))));
  }

 private:
  static HWY_INLINE F widen_low(U half) {
    const DF d;
    const hn::RebindToUnsigned<DF> du;
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
    const auto shifted = hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7FFFu)));
    const auto exponent = hn::And(shifted, hn::Set(du, 0x0F800000u));
    const auto normal = hn::Add(shifted, hn::Set(du, (127u - 15u) << 23));
    const auto infinite = hn::Add(normal, hn::Set(du, (128u - 16u) << 23));
    const auto magic = hn::BitCast(d, hn::Set(du, 113u << 23));
    const auto small = hn::Sub(hn::BitCast(d, hn::Add(normal, hn::Set(du, 1u << 23))), magic);
    const auto is_infinite = hn::Eq(exponent, hn::Set(du, 0x0F800000u));
    const auto is_small = hn::Eq(exponent, hn::Zero(du));
    const auto magnitude =
        hn::IfThenElse(is_infinite, infinite, hn::IfThenElse(is_small, hn::BitCast(du, small), normal));
    return hn::BitCast(d, hn::Or(magnitude, sign));
  }
  static HWY_INLINE U narrow_low(F value) {
    const DF d;
    const hn::RebindToUnsigned<DF> du;
    const hn::RebindToSigned<DF> di;
    const auto bits = hn::BitCast(du, value);
    const auto sign = hn::And(bits, hn::Set(du, 0x80000000u));
    const auto magnitude = hn::Xor(bits, sign);
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const auto rebias = hn::Set(du, 0xC8000FFFu);  // ((15 - 127) << 23) + 0xFFF
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, rebias), odd));
    const auto magic = hn::Set(du, ((127u - 15u) + (23u - 10u) + 1u) << 23);
    const auto small = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, magic))), magic);
    const auto as_signed = hn::BitCast(di, magnitude);  // not every target compares unsigned numbers
    const auto is_small = hn::RebindMask(du, hn::Lt(as_signed, hn::Set(di, 113 << 23)));
    const auto is_infinite = hn::RebindMask(du, hn::Gt(as_signed, hn::Set(di, 0x477FFFFF)));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    const auto result = hn::IfThenElse(is_small, small, hn::IfThenElse(is_infinite, hn::Set(du, 0x7C00u), normal));
    return hn::IfThenElse(is_nan, hn::Set(du, 0x7E00u), hn::Or(result, hn::ShiftRight<16>(sign)));
  }
};
#endif

FoldKernel find_half(DType dtype, ReduceOp op) {
  constexpr FoldKernel kFloat16[] = {
      fold_few<Float16Codec, AddStep>,      fold_few<Float16Codec, AddStep>,      fold_any<Float16Codec, MinFloatStep>,
      fold_any<Float16Codec, MaxFloatStep>, fold_any<Float16Codec, MultiplyStep>,
  };
  constexpr FoldKernel kBFloat16[] = {
      fold_few<BFloat16Codec, AddStep>,      fold_few<BFloat16Codec, AddStep>,
      fold_any<BFloat16Codec, MinFloatStep>, fold_any<BFloat16Codec, MaxFloatStep>,
      fold_any<BFloat16Codec, MultiplyStep>,
  };
  if (!supports(dtype, op)) return nullptr;
  if (dtype == DType::Float16) return kFloat16[static_cast<std::size_t>(op)];
  return dtype == DType::BFloat16 ? kBFloat16[static_cast<std::size_t>(op)] : nullptr;
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {

HWY_EXPORT(find_half);

FoldKernel find_half_kernel(DType dtype, ReduceOp op) { return HWY_DYNAMIC_DISPATCH(find_half)(dtype, op); }

}  // namespace cohort::comm
#endif
