// Kernels of integers and Bool. Sums, products and bit operations of signed and unsigned elements give the same bits,
// so only Min, Max and Average distinguish them. Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/fold_integers.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/fold.h"
#include "comm/kernels/fold_loop.h"

#include <algorithm>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {

// Divides the sums of integers exactly, truncating toward zero. Divides by multiplying, since few instruction sets
// divide integers and none divides vectors of integers.
//
// With N bits, 2^L <= divisor < 2^(L+1) and t = floor(2^(N+L) / divisor), every quotient of N bits is
// (x * factor + addend) >> (N + L). (factor, addend) is (t + 1, 0) if t + 1 is near enough, else (t, t). See
// A. D. Robison, "N-Bit Unsigned Division Via N-Bit Multiply-Add", ARITH 2005.
#if HWY_TARGET == HWY_SCALAR  // vectors of one lane cannot be divided into lanes of other sizes
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
      if (divisor > kAll) return;  // the divisor is larger than any sum, so the factor stays zero
    }
    int log = 0;
    while ((divisor >> log) > 1) ++log;
    shift_ = log;
    if ((divisor & (divisor - 1)) == 0) {
      factor_ = addend_ = kAll;
      return;
    }
    constexpr int kStep = std::min(kBits, 32);  // divisors and so remainders have less than 32 bits: the shift fits
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
    if constexpr (kBits < 64) {  // elements with even and odd index separately, in lanes of twice the bits
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
  /// Products of the lower halves.
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

template <class T>
struct IntegerCodec {
  using Element = T;
  using Accumulator = T;
  using D = hn::ScalableTag<T>;
  using Value = hn::Vec<D>;
  static constexpr bool kScalable = false;
  static constexpr std::size_t kPrefetch = 0;

  static HWY_INLINE Value load(const T* from) { return hn::LoadU(D(), from); }
  static HWY_INLINE Value widen(Value raw) { return raw; }
  static HWY_INLINE Value narrow(Value value) { return value; }
  static HWY_INLINE void one_nan(Value&) {}
  static HWY_INLINE void one_nan(Value&, Value&, Value&, Value&) {}
  template <class Step>
  static HWY_INLINE Value fold(Value total, Value value) {
    return Step::apply(total, value);
  }
};

// Loads each element as 0 or 1; "and", "or" and "exclusive or" keep that.
struct BoolCodec : IntegerCodec<std::uint8_t> {
  static HWY_INLINE Value load(const Element* from) { return widen(hn::LoadU(D(), from)); }
  static HWY_INLINE Value widen(Value raw) { return hn::Min(raw, hn::Set(D(), std::uint8_t{1})); }
};

struct MinStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Min(total, value);
  }
};
struct MaxStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Max(total, value);
  }
};
struct AndStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::And(total, value);
  }
};
struct OrStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Or(total, value);
  }
};
struct XorStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Xor(total, value);
  }
};

// Steps that multiply, since no instruction set multiplies bytes and few multiply 64 bits.
#if HWY_TARGET == HWY_SCALAR
struct MultiplyBytesStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Set(hn::DFromV<V>(), static_cast<std::uint8_t>(hn::GetLane(total) * hn::GetLane(value)));
  }
};
struct MultiplyLongStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Set(hn::DFromV<V>(), hn::GetLane(total) * hn::GetLane(value));
  }
};
#else
struct MultiplyBytesStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    const hn::DFromV<V> d;
    const hn::RepartitionToWide<decltype(d)> wide;
    const auto x = hn::BitCast(wide, total);
    const auto y = hn::BitCast(wide, value);
    const auto even = hn::And(hn::Mul(x, y), hn::Set(wide, std::uint16_t{0x00FF}));
    const auto odd = hn::ShiftLeft<8>(hn::Mul(hn::ShiftRight<8>(x), hn::ShiftRight<8>(y)));
    return hn::BitCast(d, hn::Or(even, odd));
  }
};
struct MultiplyLongStep {
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    const hn::DFromV<V> d;
    const hn::RepartitionToNarrow<decltype(d)> narrow;
    const auto low = [&](V x, V y) HWY_ATTR { return hn::MulEven(hn::BitCast(narrow, x), hn::BitCast(narrow, y)); };
    const auto cross = hn::Add(low(hn::ShiftRight<32>(total), value), low(total, hn::ShiftRight<32>(value)));
    return hn::Add(low(total, value), hn::ShiftLeft<32>(cross));
  }
};
#endif

template <class T, class Step>
constexpr FoldKernel kIntegers = fold_any<IntegerCodec<T>, Step>;

template <class Signed, class Unsigned>
FoldKernel find_extreme(ReduceOp op, DType dtype, DType signed_type) {
  if (op == ReduceOp::Min) return dtype == signed_type ? kIntegers<Signed, MinStep> : kIntegers<Unsigned, MinStep>;
  return dtype == signed_type ? kIntegers<Signed, MaxStep> : kIntegers<Unsigned, MaxStep>;
}

template <class T>
void fold_average(const FoldJob& job) {
  Loop<IntegerCodec<T>, AddStep, 0, false>(job).run(Divide<T>(job));
}

FoldKernel find_average(DType dtype) {
  switch (dtype) {
    case DType::Int8: return fold_average<std::int8_t>;
    case DType::Int16: return fold_average<std::int16_t>;
    case DType::Int32: return fold_average<std::int32_t>;
    case DType::Int64: return fold_average<std::int64_t>;
    case DType::UInt8: return fold_average<std::uint8_t>;
    case DType::UInt16: return fold_average<std::uint16_t>;
    case DType::UInt32: return fold_average<std::uint32_t>;
    case DType::UInt64: return fold_average<std::uint64_t>;
    default: return nullptr;
  }
}

FoldKernel find_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::BitOr: return fold_any<BoolCodec, OrStep>;
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::BitAnd: return fold_any<BoolCodec, AndStep>;
    case ReduceOp::BitXor: return fold_any<BoolCodec, XorStep>;
    case ReduceOp::Average: break;
  }
  return nullptr;
}

FoldKernel find_integer(DType dtype, ReduceOp op) {
  if (is_scalable(dtype) || !supports(dtype, op)) return nullptr;
  if (dtype == DType::Bool) return find_bool(op);
  if (op == ReduceOp::Average) return find_average(dtype);
  if (op == ReduceOp::BitAnd) return kIntegers<std::uint8_t, AndStep>;
  if (op == ReduceOp::BitOr) return kIntegers<std::uint8_t, OrStep>;
  if (op == ReduceOp::BitXor) return kIntegers<std::uint8_t, XorStep>;
  const bool extreme = op == ReduceOp::Min || op == ReduceOp::Max;
  const bool product = op == ReduceOp::Product;
  switch (size_of(dtype)) {
    case 1:
      if (extreme) return find_extreme<std::int8_t, std::uint8_t>(op, dtype, DType::Int8);
      return product ? kIntegers<std::uint8_t, MultiplyBytesStep> : kIntegers<std::uint8_t, AddStep>;
    case 2:
      if (extreme) return find_extreme<std::int16_t, std::uint16_t>(op, dtype, DType::Int16);
      return product ? kIntegers<std::uint16_t, MultiplyStep> : kIntegers<std::uint16_t, AddStep>;
    case 4:
      if (extreme) return find_extreme<std::int32_t, std::uint32_t>(op, dtype, DType::Int32);
      return product ? kIntegers<std::uint32_t, MultiplyStep> : kIntegers<std::uint32_t, AddStep>;
    default:
      if (extreme) return find_extreme<std::int64_t, std::uint64_t>(op, dtype, DType::Int64);
      return product ? kIntegers<std::uint64_t, MultiplyLongStep> : kIntegers<std::uint64_t, AddStep>;
  }
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {

HWY_EXPORT(find_integer);

FoldKernel find_integer_kernel(DType dtype, ReduceOp op) { return HWY_DYNAMIC_DISPATCH(find_integer)(dtype, op); }

}  // namespace cohort::comm
#endif
