// For tests: the same reductions, one element at a time, written as plainly as possible and without the kernels'
// tricks.
#pragma once

#include <cohort/dtype.h>

#include <cmath>
#include <cstdint>
#include <cstring>
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
  /// Nearest, ties to even.
  std::uint16_t encode(double value) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const auto infinity = static_cast<std::uint16_t>((2 * bias + 1) << fraction_bits);
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1 << (fraction_bits - 1)));
    const double magnitude = std::fabs(value);
    if (std::isinf(value)) return sign | infinity;
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);  // of the leading bit; denormals share the smallest
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

template <class T>
T reference_step(ReduceOp op, T total, T value) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Average: return total + value;
    case ReduceOp::Product: return total * value;
    case ReduceOp::Min: return std::isnan(value) || value < total ? value : total;
    case ReduceOp::Max: return std::isnan(value) || value > total ? value : total;
  }
  return total;
}

/// `fractions` as FoldJob's.
template <class T>
T reference_float(ReduceOp op, const std::vector<T>& values, const std::vector<double>& fractions) {
  if (values.empty()) return 0;
  const auto scaled = [&](std::size_t k) {
    return fractions.empty() ? values[k] : static_cast<T>(values[k] * static_cast<T>(fractions[k]));
  };
  T total = scaled(0);
  for (std::size_t k = 1; k < values.size(); ++k) total = reference_step<T>(op, total, scaled(k));
  if (op == ReduceOp::Average && fractions.empty()) total = total / static_cast<T>(values.size());
  return std::isnan(total) ? std::numeric_limits<T>::quiet_NaN() : total;
}

template <class T>
T reference_integer(ReduceOp op, const std::vector<T>& values) {
  if (values.empty()) return 0;
  using U = std::make_unsigned_t<T>;
  T total = values[0];
  for (std::size_t k = 1; k < values.size(); ++k) {
    const T value = values[k];
    const auto a = static_cast<std::uint64_t>(static_cast<U>(total));
    const auto b = static_cast<std::uint64_t>(static_cast<U>(value));
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average: total = static_cast<T>(static_cast<U>(a + b)); break;
      case ReduceOp::Product: total = static_cast<T>(static_cast<U>(a * b)); break;
      case ReduceOp::Min: total = value < total ? value : total; break;
      case ReduceOp::Max: total = value > total ? value : total; break;
    }
  }
  if (op == ReduceOp::Average) {
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    total = static_cast<T>(static_cast<Wide>(total) / static_cast<Wide>(values.size()));
  }
  return total;
}

using Bytes = std::vector<std::byte>;

template <class T>
Bytes reference_typed(ReduceOp op, const std::vector<Bytes>& inputs, std::int64_t count,
                      const std::vector<double>& fractions) {
  Bytes result(static_cast<std::size_t>(count) * sizeof(T));
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    std::vector<T> values(inputs.size());
    for (std::size_t k = 0; k < inputs.size(); ++k)
      std::memcpy(&values[k], inputs[k].data() + i * sizeof(T), sizeof(T));
    T out{};
    if constexpr (std::is_floating_point_v<T>) {
      out = reference_float<T>(op, values, fractions);
    } else {
      out = reference_integer<T>(op, values);
    }
    std::memcpy(result.data() + i * sizeof(T), &out, sizeof(T));
  }
  return result;
}

inline Bytes reference_small(const SmallFloat& format, ReduceOp op, const std::vector<Bytes>& inputs,
                             std::int64_t count, const std::vector<double>& fractions) {
  Bytes result(static_cast<std::size_t>(count) * 2);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    std::vector<float> values;
    for (const Bytes& input : inputs) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, input.data() + i * 2, 2);
      values.push_back(static_cast<float>(format.decode(bits)));
    }
    const std::uint16_t out = format.encode(static_cast<double>(reference_float<float>(op, values, fractions)));
    std::memcpy(result.data() + i * 2, &out, 2);
  }
  return result;
}

inline Bytes reference_fold(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, std::int64_t count,
                            const std::vector<double>& fractions = {}) {
  switch (dtype) {
    case DType::Float32: return reference_typed<float>(op, inputs, count, fractions);
    case DType::Float64: return reference_typed<double>(op, inputs, count, fractions);
    case DType::Float16: return reference_small(kHalf, op, inputs, count, fractions);
    case DType::BFloat16: return reference_small(kBrain, op, inputs, count, fractions);
    case DType::Int8: return reference_typed<std::int8_t>(op, inputs, count, fractions);
    case DType::Int16: return reference_typed<std::int16_t>(op, inputs, count, fractions);
    case DType::Int32: return reference_typed<std::int32_t>(op, inputs, count, fractions);
    case DType::Int64: return reference_typed<std::int64_t>(op, inputs, count, fractions);
    case DType::UInt8: return reference_typed<std::uint8_t>(op, inputs, count, fractions);
    case DType::UInt16: return reference_typed<std::uint16_t>(op, inputs, count, fractions);
    case DType::UInt32: return reference_typed<std::uint32_t>(op, inputs, count, fractions);
    case DType::UInt64: return reference_typed<std::uint64_t>(op, inputs, count, fractions);
  }
  return {};
}

/// Elements that show mistakes: ordinary numbers, and (seldom enough that most sums are numbers) zeros of both signs,
/// denormals, huge ones, infinities and NaN. Integers are any bits.
inline Bytes interesting(DType dtype, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed * 7919 + static_cast<std::uint64_t>(dtype));
  const std::size_t element = size_of(dtype);
  Bytes result(static_cast<std::size_t>(count) * element);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    std::uint64_t bits = random();
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
