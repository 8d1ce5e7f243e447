// For tests: the reductions of comm/kernels, one element at a time, written as plainly as possible and without the
// kernels' tricks.
#pragma once

#include "comm/kernels/fold.h"

#include <cohort/dtype.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace cohort::comm::testing {

/// Bits of a 16-bit float with `fraction_bits` (10: binary16, 7: bfloat16) and the exponent's bias.
struct SmallFloat {
  int fraction_bits;
  int bias;

  double decode(std::uint16_t bits) const {
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const int exponent = (bits & 0x7FFF) >> fraction_bits;
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == 2 * bias + 1) {
      return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  }
  /// Rounds to nearest, ties to even.
  std::uint16_t encode(double value) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const auto infinity = static_cast<std::uint16_t>((2 * bias + 1) << fraction_bits);
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1 << (fraction_bits - 1)));
    const double magnitude = std::fabs(value);
    if (std::isinf(value)) return sign | infinity;
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);  // exponent of the leading bit; denormals share the smallest
    const double quantum = std::ldexp(1.0, exponent - fraction_bits);
    const auto units = static_cast<std::int64_t>(std::nearbyint(magnitude / quantum));
    // Rounding up to the next power of two carries into the exponent by itself.
    const std::int64_t biased = exponent + bias;
    const std::int64_t bits = units >= (1 << fraction_bits) ? ((biased - 1) << fraction_bits) + units : units;
    return static_cast<std::uint16_t>(sign | std::min<std::int64_t>(bits, infinity));
  }
};
inline constexpr SmallFloat kHalf{10, 15};
inline constexpr SmallFloat kBrain{7, 127};

/// The members of FoldJob other than elements, with the same meanings.
struct Factors {
  std::vector<double> scales;
  std::int64_t divisor = 0;
  double postscale = 1;
  FoldOrder order = FoldOrder::Ascending;
};

template <class T>
T one_nan(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <class T>
T reference_step(ReduceOp op, T total, T value) {
  if (op == ReduceOp::Sum || op == ReduceOp::Average) return total + value;
  if (op == ReduceOp::Product) return total * value;
  if (op == ReduceOp::Min) return std::isnan(value) || value < total ? value : total;
  return std::isnan(value) || value > total ? value : total;
}

/// The total of [first, first + count) by the tree; `rounded` is applied to the total of each aligned block of 16, of
/// 256, .. values, but not to that of all.
template <class T, class Step, class Rounded>
T reference_in_tree(const std::vector<T>& values, std::size_t first, std::size_t count, const Step& step,
                    const Rounded& rounded) {
  const std::size_t half = std::bit_floor(count - 1);
  const T total = count == 1 ? values[first]
                             : step(reference_in_tree(values, first, half, step, rounded),
                                    reference_in_tree(values, first + half, count - half, step, rounded));
  bool is_block = false;
  for (std::size_t block = 16; count < values.size() && block <= values.size(); block *= 16) {
    is_block =
        is_block || (first % block == 0 && (count == block || (count < block && first + count == values.size())));
  }
  return is_block ? rounded(total) : total;
}

/// Folds one number of each rank: begins with the first rank's, and folds each further `value` by `step(total, value)`.
template <class T, class Step, class Rounded = std::identity>
T reference_in_order(const std::vector<T>& values, FoldOrder order, const Step& step, const Rounded& rounded = {}) {
  if (order == FoldOrder::Tree) return reference_in_tree(values, 0, values.size(), step, rounded);
  T total = values[0];
  for (std::size_t k = 1; k < values.size(); ++k) total = step(total, values[k]);
  return total;
}

template <class T>
T scaled(T value, const Factors& factors, std::size_t k) {
  return factors.scales.empty() ? value : static_cast<T>(value * static_cast<T>(factors.scales[k]));
}

template <class T>
T finished(T total, ReduceOp op, std::size_t inputs, const Factors& factors) {
  const auto divisor = factors.divisor == 0 ? static_cast<T>(inputs) : static_cast<T>(factors.divisor);
  if (op == ReduceOp::Average && divisor != 1) total = total / divisor;
  if (factors.postscale != 1) total = total * static_cast<T>(factors.postscale);
  return one_nan(total);
}

template <class T, class Rounded = std::identity>
T reference_float(ReduceOp op, std::vector<T> values, const Factors& factors, const Rounded& rounded = {}) {
  if (values.empty()) return 0;
  for (std::size_t k = 0; k < values.size(); ++k) values[k] = scaled(values[k], factors, k);
  const T total = reference_in_order(
      values, factors.order, [&](T sum, T value) { return reference_step<T>(op, sum, value); }, rounded);
  return finished(total, op, values.size(), factors);
}

template <class T>
struct Pair {
  T real;
  T imaginary;
};

template <class T>
Pair<T> reference_complex(ReduceOp op, std::vector<Pair<T>> values, const Factors& factors) {
  if (values.empty()) return {0, 0};
  for (std::size_t k = 0; k < values.size(); ++k) {
    values[k] = {scaled(values[k].real, factors, k), scaled(values[k].imaginary, factors, k)};
  }
  const Pair<T> total = reference_in_order(values, factors.order, [&](const Pair<T>& x, const Pair<T>& y) -> Pair<T> {
    if (op != ReduceOp::Product) return {x.real + y.real, x.imaginary + y.imaginary};
    return {x.real * y.real - x.imaginary * y.imaginary, x.real * y.imaginary + x.imaginary * y.real};
  });
  return {finished(total.real, op, values.size(), factors), finished(total.imaginary, op, values.size(), factors)};
}

template <class T>
T reference_integer(ReduceOp op, const std::vector<T>& values, const Factors& factors) {
  if (values.empty()) return 0;
  using U = std::make_unsigned_t<T>;
  T total = reference_in_order(values, factors.order, [&](T sum, T value) -> T {
    const auto a = static_cast<std::uint64_t>(static_cast<U>(sum));
    const auto b = static_cast<std::uint64_t>(static_cast<U>(value));
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average: return static_cast<T>(static_cast<U>(a + b));
      case ReduceOp::Product: return static_cast<T>(static_cast<U>(a * b));
      case ReduceOp::Min: return value < sum ? value : sum;
      case ReduceOp::Max: return value > sum ? value : sum;
      case ReduceOp::BitAnd: return static_cast<T>(static_cast<U>(a & b));
      case ReduceOp::BitOr: return static_cast<T>(static_cast<U>(a | b));
      case ReduceOp::BitXor: return static_cast<T>(static_cast<U>(a ^ b));
    }
    return 0;
  });
  if (op == ReduceOp::Average) {
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    const auto divisor = factors.divisor == 0 ? static_cast<Wide>(values.size()) : static_cast<Wide>(factors.divisor);
    total = static_cast<T>(static_cast<Wide>(total) / divisor);
  }
  return total;
}

inline std::uint8_t reference_bool(ReduceOp op, const std::vector<std::uint8_t>& values) {
  std::size_t set = 0;
  for (const std::uint8_t value : values) set += value != 0 ? 1 : 0;
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::BitOr: return set > 0 ? 1 : 0;
    case ReduceOp::BitXor: return static_cast<std::uint8_t>(set % 2);
    default: return !values.empty() && set == values.size() ? 1 : 0;
  }
}

using Bytes = std::vector<std::byte>;

/// Computes a result of type T for each position; `element(values)` gets all inputs' values at one position.
template <class T, class Element>
Bytes reference_elements(const std::vector<Bytes>& inputs, std::int64_t count, const Element& element) {
  Bytes result(static_cast<std::size_t>(count) * sizeof(T));
  std::vector<T> values(inputs.size());
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    for (std::size_t k = 0; k < inputs.size(); ++k)
      std::memcpy(&values[k], inputs[k].data() + i * sizeof(T), sizeof(T));
    const T out = element(values);
    std::memcpy(result.data() + i * sizeof(T), &out, sizeof(T));
  }
  return result;
}

inline Bytes reference_fold(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, std::int64_t count,
                            const Factors& factors = {}) {
  const auto real = [&](auto zero) {
    using T = decltype(zero);
    return reference_elements<T>(inputs, count,
                                 [&](const std::vector<T>& values) { return reference_float(op, values, factors); });
  };
  const auto small = [&](const SmallFloat& format) {
    return reference_elements<std::uint16_t>(inputs, count, [&](const std::vector<std::uint16_t>& values) {
      std::vector<float> wide;
      for (const std::uint16_t bits : values) wide.push_back(static_cast<float>(format.decode(bits)));
      const auto rounded = [&](float total) {
        return static_cast<float>(format.decode(format.encode(static_cast<double>(total))));
      };
      return format.encode(static_cast<double>(reference_float(op, wide, factors, rounded)));
    });
  };
  const auto complex = [&](auto zero) {
    using T = Pair<decltype(zero)>;
    return reference_elements<T>(inputs, count,
                                 [&](const std::vector<T>& values) { return reference_complex(op, values, factors); });
  };
  const auto integer = [&](auto zero) {
    using T = decltype(zero);
    return reference_elements<T>(inputs, count,
                                 [&](const std::vector<T>& values) { return reference_integer(op, values, factors); });
  };
  switch (dtype) {
    case DType::Float32: return real(float{});
    case DType::Float64: return real(double{});
    case DType::Float16: return small(kHalf);
    case DType::BFloat16: return small(kBrain);
    case DType::Int8: return integer(std::int8_t{});
    case DType::Int16: return integer(std::int16_t{});
    case DType::Int32: return integer(std::int32_t{});
    case DType::Int64: return integer(std::int64_t{});
    case DType::UInt8: return integer(std::uint8_t{});
    case DType::UInt16: return integer(std::uint16_t{});
    case DType::UInt32: return integer(std::uint32_t{});
    case DType::UInt64: return integer(std::uint64_t{});
    case DType::Bool:
      return reference_elements<std::uint8_t>(
          inputs, count, [&](const std::vector<std::uint8_t>& values) { return reference_bool(op, values); });
    case DType::Complex64: return complex(float{});
    case DType::Complex128: return complex(double{});
  }
  return {};
}

/// Elements that show mistakes: ordinary numbers, and (seldom enough that most sums are numbers) zeros of both signs,
/// denormals, huge numbers, infinities and NaN. Integers have any bits; half of all bools are false, the rest any byte.
inline Bytes interesting(DType dtype, std::int64_t count, std::uint64_t seed) {
  if (is_complex(dtype)) {
    return interesting(dtype == DType::Complex64 ? DType::Float32 : DType::Float64, 2 * count, seed + 4711);
  }
  std::mt19937_64 random(seed * 7919 + static_cast<std::uint64_t>(dtype));
  const std::size_t element = size_of(dtype);
  Bytes result(static_cast<std::size_t>(count) * element);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    std::uint64_t bits = random();
    if (dtype == DType::Bool && (bits & 256) != 0) bits = 0;
    if (is_floating(dtype)) {
      const std::uint64_t kind = random() % 64;
      double value = std::ldexp(static_cast<double>(static_cast<std::int64_t>(random() % 20001) - 10000), -7);
      if (kind == 0) value = 0.0;
      if (kind == 1) value = -0.0;
      if (kind == 2) value = std::numeric_limits<double>::infinity();
      const bool raw = kind == 3 || kind == 4;  // any bits: NaN of any payload, denormals, huge ones
      const bool denormal = kind == 5 || kind == 6;
      if (dtype == DType::Float32 && !raw) {
        const float narrow = denormal ? std::ldexp(static_cast<float>(value), -145) : static_cast<float>(value) / 3;
        std::memcpy(&bits, &narrow, 4);
      } else if (dtype == DType::Float64 && !raw) {
        const double wide = denormal ? std::ldexp(value, -1070) : value / 3;
        std::memcpy(&bits, &wide, 8);
      } else if (!raw) {
        const SmallFloat& format = dtype == DType::Float16 ? kHalf : kBrain;
        bits = format.encode(denormal ? std::ldexp(value, dtype == DType::Float16 ? -22 : -135) : value);
      }
    }
    std::memcpy(result.data() + i * element, &bits, element);
  }
  return result;
}

}  // namespace cohort::comm::testing
