// Kernels of float32, float64, complex64 and complex128. Compiled once per instruction set by foreach_target.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/fold_floats.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/fold.h"
#include "comm/kernels/fold_loop.h"

#include <bit>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {

template <class T>
struct FloatCodec {
  using Element = T;
  using Accumulator = T;
  using D = hn::ScalableTag<T>;
  using Value = hn::Vec<D>;
  static constexpr bool kScalable = true;
  static constexpr std::size_t kPrefetch = 0;

  static HWY_INLINE Value load(const T* from) { return hn::LoadU(D(), from); }
  static HWY_INLINE Value widen(Value raw) { return raw; }
  static HWY_INLINE Value narrow(Value value) { return value; }
  static HWY_INLINE void one_nan(Value& value) {
    using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    constexpr Bits kNaN = sizeof(T) == 4 ? static_cast<Bits>(0x7FC00000u) : static_cast<Bits>(0x7FF8000000000000ull);
    const D d;
    const hn::RebindToUnsigned<D> du;
    value = hn::IfThenElse(hn::IsNaN(value), hn::BitCast(d, hn::Set(du, kNaN)), value);
  }
  static HWY_INLINE void one_nan(Value& a, Value& b, Value& c, Value& e) {
    one_nan(a);
    one_nan(b);
    one_nan(c);
    one_nan(e);
  }
  template <class Step>
  static HWY_INLINE Value fold(Value total, Value value) {
    return Step::apply(total, value);
  }
  static HWY_INLINE Value multiply(Value value, T factor) { return hn::Mul(value, hn::Set(D(), factor)); }
  static HWY_INLINE Value divide(Value value, T divisor) { return hn::Div(value, hn::Set(D(), divisor)); }
};

// Complex product: (a, b) times (c, d) is (ac - bd, ad + bc).
#if HWY_TARGET == HWY_SCALAR  // vectors of one lane cannot hold the two parts of a number
template <class T>
struct Number {
  T a, b;
};
// The product of the inputs [first, first + count) at element i.
template <class T>
Number<T> product(const FoldJob& job, std::size_t i, std::size_t first, std::size_t count) {
  if (count == 1) {
    T y[2];
    std::memcpy(y, static_cast<const T*>(job.inputs[first]) + 2 * i, sizeof(y));
    const T scale = job.scales.empty() ? T{1} : static_cast<T>(job.scales[first]);
    return {y[0] * scale, y[1] * scale};
  }
  const std::size_t left = job.order == FoldOrder::Tree ? std::bit_floor(count - 1) : count - 1;
  const Number<T> x = product<T>(job, i, first, left);
  const Number<T> y = product<T>(job, i, first + left, count - left);
  return {x.a * y.a - x.b * y.b, x.a * y.b + x.b * y.a};
}
template <class T>
void fold_complex_product(const FoldJob& job) {
  using Codec = FloatCodec<T>;
  const Finish<Codec> finish(job);
  for (std::size_t i = 0; i < static_cast<std::size_t>(job.count); ++i) {
    const Number<T> total = product<T>(job, i, 0, job.inputs.size());
    auto real = finish.apply(hn::Set(typename Codec::D(), total.a));
    auto imaginary = finish.apply(hn::Set(typename Codec::D(), total.b));
    Codec::one_nan(real);
    Codec::one_nan(imaginary);
    const T result[2] = {hn::GetLane(real), hn::GetLane(imaginary)};
    for (void* const output : job.outputs) std::memcpy(static_cast<T*>(output) + 2 * i, result, sizeof(result));
  }
}
#else
struct ComplexMultiplyStep {  // real parts are in even lanes
  static constexpr bool kRounds = true;
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    const hn::DFromV<V> d;
    const V real = hn::Mul(hn::DupEven(total), value);                       // ac, ad
    const V imaginary = hn::Mul(hn::DupOdd(total), hn::Reverse2(d, value));  // bd, bc
    return hn::OddEven(hn::Add(real, imaginary), hn::Sub(real, imaginary));
  }
};
template <class T>
void fold_complex_product(const FoldJob& job) {
  fold_any<FloatCodec<T>, ComplexMultiplyStep>(job);
}
#endif

FoldKernel find_float(DType dtype, ReduceOp op) {
  constexpr FoldKernel kFloat32[] = {
      fold_few<FloatCodec<float>, AddStep>,      fold_few<FloatCodec<float>, AddStep>,
      fold_any<FloatCodec<float>, MinFloatStep>, fold_any<FloatCodec<float>, MaxFloatStep>,
      fold_any<FloatCodec<float>, MultiplyStep>,
  };
  constexpr FoldKernel kFloat64[] = {
      fold_few<FloatCodec<double>, AddStep>,      fold_few<FloatCodec<double>, AddStep>,
      fold_any<FloatCodec<double>, MinFloatStep>, fold_any<FloatCodec<double>, MaxFloatStep>,
      fold_any<FloatCodec<double>, MultiplyStep>,
  };
  if (!supports(dtype, op)) return nullptr;
  const auto index = static_cast<std::size_t>(op);
  const bool product = op == ReduceOp::Product;
  switch (dtype) {
    case DType::Float32: return kFloat32[index];
    case DType::Float64: return kFloat64[index];
    case DType::Complex64: return product ? fold_complex_product<float> : kFloat32[index];
    case DType::Complex128: return product ? fold_complex_product<double> : kFloat64[index];
    default: return nullptr;
  }
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {

HWY_EXPORT(find_float);

FoldKernel find_float_kernel(DType dtype, ReduceOp op) { return HWY_DYNAMIC_DISPATCH(find_float)(dtype, op); }

}  // namespace cohort::comm
#endif
