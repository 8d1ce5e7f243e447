// Compiled once per instruction set by foreach_target.h; `fold` at the end picks the best one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/kernels/fold.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "comm/kernels/fold.h"

#include "base/result.h"
#include "comm/kernels/float_environment.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How elements of a type come from memory into the vectors that are computed with, and back. `finish` makes one NaN.
template <class T>
struct PlainCodec {
  using Element = T;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static V load(D d, const Element* from) { return hn::LoadU(d, from); }
  static void store(D d, V value, Element* to) {
    using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    constexpr Bits kNaN = sizeof(T) == 4 ? static_cast<Bits>(0x7FC00000u) : static_cast<Bits>(0x7FF8000000000000ull);
    const hn::RebindToUnsigned<D> du;
    hn::StoreU(hn::IfThenElse(hn::IsNaN(value), hn::BitCast(d, hn::Set(du, kNaN)), value), d, to);
  }
};

struct BFloat16Codec {
  using Element = std::uint16_t;
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  static V load(D d, const Element* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> du16;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from))));
  }
  // In integers, because the conversion instructions flush denormals.
  static void store(D, V value, Element* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint16_t, D> du16;
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu))));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    const auto result = hn::IfThenElse(is_nan, hn::Set(du, 0x7FC0u), rounded);
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, result)), du16, to);
  }
};

// The two conversions without F16C are after F. Giesen, "Half to float done quick" and its inverse (public domain),
// since Highway's own ones truncate and do not know infinities.
struct Float16Codec {
  using Element = std::uint16_t;
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  static V load(D d, const Element* from) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const hn::Rebind<std::uint16_t, D> du16;
    return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(du16, from)));
  }
  static void store(D d, V value, Element* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<hwy::float16_t, D> dh;
    const hn::Rebind<std::uint16_t, D> du16;
    const auto quiet = hn::BitCast(d, hn::Set(du, 0x7FC00000u));
    hn::StoreU(hn::BitCast(du16, hn::DemoteTo(dh, hn::IfThenElse(hn::IsNaN(value), quiet, value))), du16, to);
  }
#else
  static V load(D d, const Element* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> du16;
    const auto half = hn::PromoteTo(du, hn::LoadU(du16, from));
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
  static void store(D d, V value, Element* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint16_t, D> du16;
    const auto bits = hn::BitCast(du, value);
    const auto sign = hn::And(bits, hn::Set(du, 0x80000000u));
    const auto magnitude = hn::Xor(bits, sign);
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const auto rebias = hn::Set(du, 0xC8000FFFu);  // ((15 - 127) << 23) + 0xFFF
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, rebias), odd));
    const auto magic = hn::Set(du, ((127u - 15u) + (23u - 10u) + 1u) << 23);
    const auto small = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, magic))), magic);
    const auto as_signed = hn::BitCast(di, magnitude);  // comparisons of unsigned are not on every target
    const auto is_small = hn::RebindMask(du, hn::Lt(as_signed, hn::Set(di, 113 << 23)));
    const auto is_infinite = hn::RebindMask(du, hn::Gt(as_signed, hn::Set(di, 0x477FFFFF)));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    auto result = hn::IfThenElse(is_small, small, hn::IfThenElse(is_infinite, hn::Set(du, 0x7C00u), normal));
    result = hn::IfThenElse(is_nan, hn::Set(du, 0x7E00u), hn::Or(result, hn::ShiftRight<16>(sign)));
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, result)), du16, to);
  }
#endif
};

struct AddStep {
  template <class V>
  static V apply(V total, V value) {
    return hn::Add(total, value);
  }
};
struct MultiplyStep {
  template <class V>
  static V apply(V total, V value) {
    return hn::Mul(total, value);
  }
};
// A NaN wins and stays; of equals (+0 and -0) the first rank's stays. Spelled out, since min instructions differ.
struct MinStep {
  template <class V>
  static V apply(V total, V value) {
    return hn::IfThenElse(hn::Or(hn::Lt(value, total), hn::IsNaN(value)), value, total);
  }
};
struct MaxStep {
  template <class V>
  static V apply(V total, V value) {
    return hn::IfThenElse(hn::Or(hn::Lt(total, value), hn::IsNaN(value)), value, total);
  }
};

template <class Codec, class Step, bool kScaled, bool kFinish>
void fold_floats(const FoldJob& job) {
  using Element = typename Codec::Element;
  using D = typename Codec::D;
  using T = hn::TFromD<D>;
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t count = static_cast<std::size_t>(job.count);
  const std::size_t inputs = job.inputs.size();
  const auto input = [&](std::size_t k) { return static_cast<const Element*>(job.inputs[k]); };
  const std::int64_t parts = job.op != ReduceOp::Average ? 1
                             : job.divisor == 0          ? static_cast<std::int64_t>(inputs)
                                                         : job.divisor;
  const auto divisor = hn::Set(d, static_cast<T>(parts));
  const auto postscale = hn::Set(d, static_cast<T>(job.postscale));
  const auto scaled = [&](std::size_t k, auto value) {
    if constexpr (kScaled) {
      return hn::Mul(value, hn::Set(d, static_cast<T>(job.scales[k])));
    } else {
      return value;
    }
  };
  const auto finished = [&](auto value) {
    if constexpr (kFinish) {  // dividing by 1 and multiplying by 1 change nothing
      return hn::Mul(hn::Div(value, divisor), postscale);
    } else {
      return value;
    }
  };

  std::size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const Element* first = input(0) + i;
    auto a = scaled(0, Codec::load(d, first));
    auto b = scaled(0, Codec::load(d, first + lanes));
    auto c = scaled(0, Codec::load(d, first + 2 * lanes));
    auto e = scaled(0, Codec::load(d, first + 3 * lanes));
    for (std::size_t k = 1; k < inputs; ++k) {
      const Element* next = input(k) + i;
      a = Step::apply(a, scaled(k, Codec::load(d, next)));
      b = Step::apply(b, scaled(k, Codec::load(d, next + lanes)));
      c = Step::apply(c, scaled(k, Codec::load(d, next + 2 * lanes)));
      e = Step::apply(e, scaled(k, Codec::load(d, next + 3 * lanes)));
    }
    a = finished(a);
    b = finished(b);
    c = finished(c);
    e = finished(e);
    for (void* const output : job.outputs) {
      Element* to = static_cast<Element*>(output) + i;
      Codec::store(d, a, to);
      Codec::store(d, b, to + lanes);
      Codec::store(d, c, to + 2 * lanes);
      Codec::store(d, e, to + 3 * lanes);
    }
  }
  // The rest through a padded vector, so that the last elements meet the same instructions as the others.
  for (; i < count; i += lanes) {
    Element padded[HWY_MAX_BYTES / sizeof(Element)] = {};
    const std::size_t bytes = std::min(lanes, count - i) * sizeof(Element);
    std::memcpy(padded, input(0) + i, bytes);
    auto total = scaled(0, Codec::load(d, padded));
    for (std::size_t k = 1; k < inputs; ++k) {
      std::memcpy(padded, input(k) + i, bytes);
      total = Step::apply(total, scaled(k, Codec::load(d, padded)));
    }
    Codec::store(d, finished(total), padded);
    for (void* const output : job.outputs) std::memcpy(static_cast<Element*>(output) + i, padded, bytes);
  }
}

template <class Codec, class Step>
void fold_floats(const FoldJob& job) {
  const bool finish = (job.op == ReduceOp::Average && job.divisor != 1) || job.postscale != 1;
  if (job.scales.empty()) {
    return finish ? fold_floats<Codec, Step, false, true>(job) : fold_floats<Codec, Step, false, false>(job);
  }
  return finish ? fold_floats<Codec, Step, true, true>(job) : fold_floats<Codec, Step, true, false>(job);
}

template <class Codec>
void fold_floating(const FoldJob& job) {
  switch (job.op) {
    case ReduceOp::Sum:
    case ReduceOp::Average: return fold_floats<Codec, AddStep>(job);
    case ReduceOp::Min: return fold_floats<Codec, MinStep>(job);
    case ReduceOp::Max: return fold_floats<Codec, MaxStep>(job);
    case ReduceOp::Product: return fold_floats<Codec, MultiplyStep>(job);
    default: return;
  }
}

template <class T>
void fold_complex(const FoldJob& job) {
  if (job.op != ReduceOp::Product) {
    FoldJob components = job;
    components.count *= 2;
    return fold_floating<PlainCodec<T>>(components);
  }
  const auto postscale = static_cast<T>(job.postscale);
  const auto one_nan = [](T value) { return value == value ? value : std::numeric_limits<T>::quiet_NaN(); };
  for (std::size_t i = 0; i < static_cast<std::size_t>(job.count); ++i) {
    T a = 0;
    T b = 0;
    for (std::size_t k = 0; k < job.inputs.size(); ++k) {
      const T scale = job.scales.empty() ? T{1} : static_cast<T>(job.scales[k]);
      T y[2];
      std::memcpy(y, static_cast<const T*>(job.inputs[k]) + 2 * i, sizeof(y));
      const T c = y[0] * scale;
      const T d = y[1] * scale;
      const T real = k == 0 ? c : a * c - b * d;
      b = k == 0 ? d : a * d + b * c;
      a = real;
    }
    const T result[2] = {one_nan(a * postscale), one_nan(b * postscale)};
    for (void* const output : job.outputs) std::memcpy(static_cast<T*>(output) + 2 * i, result, sizeof(result));
  }
}

void fold_bools(const FoldJob& job) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(job.count); ++i) {
    bool total = false;
    for (std::size_t k = 0; k < job.inputs.size(); ++k) {
      const bool value = static_cast<const unsigned char*>(job.inputs[k])[i] != 0;
      if (k == 0) {
        total = value;
      } else if (job.op == ReduceOp::BitXor) {
        total = total != value;
      } else if (job.op == ReduceOp::Sum || job.op == ReduceOp::Max || job.op == ReduceOp::BitOr) {
        total = total || value;
      } else {
        total = total && value;
      }
    }
    for (void* const output : job.outputs) static_cast<unsigned char*>(output)[i] = total ? 1 : 0;
  }
}

// Integers are folded in blocks that stay in the first-level cache; the compiler turns the loops into vectors. Unsigned
// arithmetic wraps, and is what two's complement does with signed values.
template <class T>
void fold_integers(const FoldJob& job) {
  using Wrapping = std::conditional_t<(sizeof(T) < 4), std::uint32_t, std::make_unsigned_t<T>>;
  constexpr std::size_t kBlock = 2048 / sizeof(T);
  T total[kBlock];
  const std::size_t count = static_cast<std::size_t>(job.count);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t length = std::min(kBlock, count - begin);
    std::memcpy(total, static_cast<const T*>(job.inputs[0]) + begin, length * sizeof(T));
    for (std::size_t k = 1; k < job.inputs.size(); ++k) {
      const T* next = static_cast<const T*>(job.inputs[k]) + begin;
      switch (job.op) {
        case ReduceOp::Sum:
        case ReduceOp::Average:
          for (std::size_t i = 0; i < length; ++i) {
            total[i] = static_cast<T>(static_cast<Wrapping>(total[i]) + static_cast<Wrapping>(next[i]));
          }
          break;
        case ReduceOp::Product:
          for (std::size_t i = 0; i < length; ++i) {
            total[i] = static_cast<T>(static_cast<Wrapping>(total[i]) * static_cast<Wrapping>(next[i]));
          }
          break;
        case ReduceOp::Min:
          for (std::size_t i = 0; i < length; ++i) total[i] = next[i] < total[i] ? next[i] : total[i];
          break;
        case ReduceOp::Max:
          for (std::size_t i = 0; i < length; ++i) total[i] = next[i] > total[i] ? next[i] : total[i];
          break;
        case ReduceOp::BitAnd:
          for (std::size_t i = 0; i < length; ++i) total[i] = static_cast<T>(total[i] & next[i]);
          break;
        case ReduceOp::BitOr:
          for (std::size_t i = 0; i < length; ++i) total[i] = static_cast<T>(total[i] | next[i]);
          break;
        case ReduceOp::BitXor:
          for (std::size_t i = 0; i < length; ++i) total[i] = static_cast<T>(total[i] ^ next[i]);
          break;
      }
    }
    if (job.op == ReduceOp::Average) {
      // In 64 bits, where the number of ranks always fits.
      using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
      const auto divisor = job.divisor == 0 ? static_cast<Wide>(job.inputs.size()) : static_cast<Wide>(job.divisor);
      for (std::size_t i = 0; i < length; ++i) total[i] = static_cast<T>(static_cast<Wide>(total[i]) / divisor);
    }
    for (void* const output : job.outputs) {
      std::memcpy(static_cast<T*>(output) + begin, total, length * sizeof(T));
    }
  }
}

void fold_target(const FoldJob& job) {
  switch (job.dtype) {
    case DType::Float32: return fold_floating<PlainCodec<float>>(job);
    case DType::Float64: return fold_floating<PlainCodec<double>>(job);
    case DType::Float16: return fold_floating<Float16Codec>(job);
    case DType::BFloat16: return fold_floating<BFloat16Codec>(job);
    case DType::Int8: return fold_integers<std::int8_t>(job);
    case DType::Int16: return fold_integers<std::int16_t>(job);
    case DType::Int32: return fold_integers<std::int32_t>(job);
    case DType::Int64: return fold_integers<std::int64_t>(job);
    case DType::UInt8: return fold_integers<std::uint8_t>(job);
    case DType::UInt16: return fold_integers<std::uint16_t>(job);
    case DType::UInt32: return fold_integers<std::uint32_t>(job);
    case DType::UInt64: return fold_integers<std::uint64_t>(job);
    case DType::Bool: return fold_bools(job);
    case DType::Complex64: return fold_complex<float>(job);
    case DType::Complex128: return fold_complex<double>(job);
  }
}

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cohort::comm {

HWY_EXPORT(fold_target);

namespace {

void check(const FoldJob& job) {
  constexpr std::int64_t kLargestDivisor = 1 << 24;
  if (!supports(job.dtype, job.op)) {
    raise(ErrorCode::InvalidArgument, "fold: {} has no {}", to_string(job.dtype), to_string(job.op));
  }
  const bool factors = !job.scales.empty() || job.postscale != 1;
  if (factors && !is_scalable(job.dtype)) {
    raise(ErrorCode::InvalidArgument, "fold: factors with elements of type {}", to_string(job.dtype));
  }
  if (!job.scales.empty() && job.scales.size() != job.inputs.size()) {
    raise(ErrorCode::InvalidArgument, "fold: {} scales for {} inputs", job.scales.size(), job.inputs.size());
  }
  if (job.divisor < 0 || job.divisor > kLargestDivisor) {
    raise(ErrorCode::InvalidArgument, "fold: a divisor of {}", job.divisor);
  }
}

}  // namespace

void fold(const FoldJob& job) {
  check(job);
  if (job.count == 0 || job.outputs.empty()) return;
  if (job.inputs.empty()) {
    for (void* const output : job.outputs)
      std::memset(output, 0, static_cast<std::size_t>(job.count) * size_of(job.dtype));
    return;
  }
  const FloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(fold_target)(job);
}

Weighting weigh(std::span<const double> weights) {
  Weighting result;
  double largest = 0;
  bool equal = true;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0) continue;
    if (!result.members.empty()) equal = equal && weights[i] == largest;
    largest = std::max(largest, weights[i]);
    result.members.push_back(static_cast<int>(i));
  }
  if (equal) return result;
  double total = 0;  // relative to the largest, so that no weights can overflow it
  for (const int member : result.members) total += weights[static_cast<std::size_t>(member)] / largest;
  for (const int member : result.members) {
    result.fractions.push_back(weights[static_cast<std::size_t>(member)] / largest / total);
  }
  return result;
}

std::vector<std::string> fold_targets() {
  std::vector<std::string> names;
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {  // the lowest bit is the best target
    names.emplace_back(hwy::TargetName(rest & -rest));
  }
  return names;
}

}  // namespace cohort::comm
#endif
