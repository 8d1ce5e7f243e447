// Integers and Bool. Compiled once per instruction set by foreach_target.h. Sums, products and bit operations of signed
// and unsigned elements are the same bits, so only Min, Max and Average know the sign.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/fold_integers.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/fold_average.h"
#include "comm/kernels/fold_kernels.h"
#include "comm/kernels/fold_loop.h"

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {

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

// 0 or 1 for each element, which "and", "or" and "exclusive or" keep.
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

// No instruction set multiplies bytes, and few multiply 64 bits.
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
