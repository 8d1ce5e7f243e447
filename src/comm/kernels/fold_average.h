// How `fold` divides the sums of integers: by multiplying, since few instruction sets divide integers and none divides
// vectors of them, exactly and with truncation toward zero. Included once per instruction set by fold_integers.cpp,
// which is why the guard toggles; nothing else includes it.
//
// With N bits, 2^L <= divisor < 2^(L+1) and t = floor(2^(N+L) / divisor), every quotient of N bits is
// (x * factor + addend) >> (N + L), with (t + 1, 0) for factor and addend if t + 1 is near enough, and (t, t) if not:
// A. D. Robison, "N-Bit Unsigned Division Via N-Bit Multiply-Add", ARITH 2005.
#if defined(COHORT_COMM_KERNELS_FOLD_AVERAGE_H) == defined(HWY_TARGET_TOGGLE)
#ifdef COHORT_COMM_KERNELS_FOLD_AVERAGE_H
#undef COHORT_COMM_KERNELS_FOLD_AVERAGE_H
#else
#define COHORT_COMM_KERNELS_FOLD_AVERAGE_H
#endif

#include "comm/kernels/fold.h"

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR  // vectors of one lane hold no halves
template <class T>
class Divide {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  using D = hn::ScalableTag<T>;

 public:
  explicit Divide(const FoldJob& job)
      : divisor_(job.divisor == 0 ? static_cast<Wide>(job.inputs.size()) : static_cast<Wide>(job.divisor)) {}
  HWY_INLINE bool any() const { return divisor_ != 1; }
  HWY_INLINE hn::Vec<D> apply(hn::Vec<D> value) const {
    return hn::Set(D(), static_cast<T>(static_cast<Wide>(hn::GetLane(value)) / divisor_));
  }

 private:
  Wide divisor_;
};
#else
template <class T>
class Divide {
  using U = std::make_unsigned_t<T>;
  using D = hn::ScalableTag<T>;
  using DU = hn::RebindToUnsigned<D>;
  using V = hn::Vec<D>;
  using VU = hn::Vec<DU>;
  static constexpr int kBits = static_cast<int>(8 * sizeof(T));
  static constexpr U kAll = static_cast<U>(~U{0});

 public:
  explicit Divide(const FoldJob& job) {
    const std::uint64_t divisor = job.divisor == 0 ? job.inputs.size() : static_cast<std::uint64_t>(job.divisor);
    any_ = divisor != 1;
    if constexpr (kBits < 64) {
      if (divisor > kAll) return;  // larger than any sum: a factor of zero
    }
    int log = 0;
    while ((divisor >> log) > 1) ++log;
    shift_ = log;
    if ((divisor & (divisor - 1)) == 0) {
      factor_ = addend_ = kAll;
      return;
    }
    constexpr int kStep = std::min(kBits, 32);  // since divisors have less than 32 bits, remainders leave room for it
    std::uint64_t quotient = 0;
    std::uint64_t remainder = std::uint64_t{1} << log;
    for (int bits = 0; bits < kBits; bits += kStep) {
      remainder <<= kStep;
      quotient = (quotient << kStep) | remainder / divisor;
      remainder %= divisor;
    }
    const bool up = divisor - remainder <= std::uint64_t{1} << log;
    factor_ = static_cast<U>(up ? quotient + 1 : quotient);
    addend_ = static_cast<U>(up ? 0 : quotient);
  }
  HWY_INLINE bool any() const { return any_; }
  HWY_INLINE V apply(V value) const {
    if constexpr (std::is_signed_v<T>) {
      const V sign = hn::BroadcastSignBit(value);
      const VU magnitude = hn::BitCast(DU(), hn::Sub(hn::Xor(value, sign), sign));
      return hn::Sub(hn::Xor(hn::BitCast(D(), quotient(magnitude)), sign), sign);
    } else {
      return quotient(value);
    }
  }

 private:
  HWY_INLINE VU quotient(VU x) const {
    if constexpr (kBits < 64) {  // the elements with even and those with odd index, in lanes of twice the bits
      const hn::RepartitionToWide<DU> dw;
      const auto pairs = hn::BitCast(dw, x);
      const auto even = half_quotient(hn::And(pairs, hn::Set(dw, kAll)));
      const auto odd = half_quotient(hn::ShiftRight<kBits>(pairs));
      return hn::BitCast(DU(), hn::Or(even, hn::ShiftLeft<kBits>(odd)));
    } else {  // schoolbook multiplication of halves; no sum overflows
      const VU half = hn::Set(DU(), kAll >> 32);
      const VU factor = hn::Set(DU(), factor_);
      const VU factor_high = hn::ShiftRight<32>(factor);
      const VU addend = hn::Set(DU(), addend_);
      const VU x_high = hn::ShiftRight<32>(x);
      const VU first = hn::Add(multiply_low(x, factor), hn::And(addend, half));
      const VU second = hn::Add(multiply_low(x, factor_high), hn::ShiftRight<32>(first));
      const VU third =
          hn::Add(hn::Add(multiply_low(x_high, factor), hn::And(second, half)), hn::ShiftRight<32>(addend));
      const VU high =
          hn::Add(hn::Add(multiply_low(x_high, factor_high), hn::ShiftRight<32>(second)), hn::ShiftRight<32>(third));
      return hn::ShiftRightSame(high, shift_);
    }
  }
  template <class W>
  HWY_INLINE W half_quotient(W x) const {
    const hn::DFromV<W> dw;
    W product = hn::Zero(dw);
    if constexpr (kBits == 32) {
      product = hn::MulEven(hn::BitCast(DU(), x), hn::Set(DU(), factor_));
    } else {
      product = hn::Mul(x, hn::Set(dw, factor_));
    }
    return hn::ShiftRightSame(hn::Add(product, hn::Set(dw, addend_)), kBits + shift_);
  }
  /// Of the lower halves.
  static HWY_INLINE VU multiply_low(VU x, VU y) {
    const hn::Repartition<std::uint32_t, DU> narrow;
    return hn::MulEven(hn::BitCast(narrow, x), hn::BitCast(narrow, y));
  }

  bool any_ = false;
  int shift_ = 0;
  U factor_ = 0;
  U addend_ = 0;
};
#endif

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
