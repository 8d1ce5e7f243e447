#include "named/neutral.h"

#include <algorithm>
#include <complex>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace cohort::named {
namespace {

template <class T>
void fill(Buffer to, T value) {
  std::fill_n(static_cast<T*>(to.data), to.count, value);
}

/// The elements of 16-bit floats as they are stored.
struct HalfBits {
  std::uint16_t one, infinity;  // the highest bit is the sign
};

void fill_half(Buffer to, ReduceOp op, bool flipped, const HalfBits& bits) {
  constexpr unsigned kSign = 0x8000;
  const unsigned sign = flipped ? kSign : 0;
  switch (op) {
    case ReduceOp::Product: return fill(to, bits.one);
    case ReduceOp::Min: return fill(to, static_cast<std::uint16_t>(bits.infinity ^ sign));
    case ReduceOp::Max: return fill(to, static_cast<std::uint16_t>(bits.infinity ^ kSign ^ sign));
    default: return fill(to, static_cast<std::uint16_t>(kSign ^ sign));
  }
}

template <class T>
void fill_float(Buffer to, ReduceOp op, bool flipped) {
  const T sign = flipped ? T{-1} : T{1};
  switch (op) {
    case ReduceOp::Product: return fill(to, T{1});
    case ReduceOp::Min: return fill(to, sign * std::numeric_limits<T>::infinity());
    case ReduceOp::Max: return fill(to, -sign * std::numeric_limits<T>::infinity());
    default: return fill(to, -sign * T{0});
  }
}

template <class T>
void fill_complex(Buffer to, ReduceOp op, bool flipped) {
  // The product with (1, 0) is (a - 0 b, 0 a + b): exact for finite numbers but for the sign of zeros.
  const T zero = flipped ? T{0} : -T{0};
  fill(to, op == ReduceOp::Product ? std::complex<T>(1, 0) : std::complex<T>(zero, zero));
}

template <class T>
void fill_integer(Buffer to, ReduceOp op) {
  switch (op) {
    case ReduceOp::Product: return fill(to, T{1});
    case ReduceOp::Min: return fill(to, std::numeric_limits<T>::max());
    case ReduceOp::Max: return fill(to, std::numeric_limits<T>::min());
    case ReduceOp::BitAnd: return fill(to, static_cast<T>(~T{0}));
    default: return fill(to, T{0});
  }
}

void fill_bool(Buffer to, ReduceOp op) {
  const bool conjunction = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::BitAnd;
  fill(to, static_cast<std::uint8_t>(conjunction ? 1 : 0));
}

}  // namespace

void fill_neutral(Buffer to, ReduceOp op, double prescale) {
  const bool flipped = prescale < 0;
  if (to.count == 0) return;
  switch (to.dtype) {
    case DType::Float32: return fill_float<float>(to, op, flipped);
    case DType::Float64: return fill_float<double>(to, op, flipped);
    case DType::Float16: return fill_half(to, op, flipped, {0x3C00, 0x7C00});
    case DType::BFloat16: return fill_half(to, op, flipped, {0x3F80, 0x7F80});
    case DType::Int8: return fill_integer<std::int8_t>(to, op);
    case DType::Int16: return fill_integer<std::int16_t>(to, op);
    case DType::Int32: return fill_integer<std::int32_t>(to, op);
    case DType::Int64: return fill_integer<std::int64_t>(to, op);
    case DType::UInt8: return fill_integer<std::uint8_t>(to, op);
    case DType::UInt16: return fill_integer<std::uint16_t>(to, op);
    case DType::UInt32: return fill_integer<std::uint32_t>(to, op);
    case DType::UInt64: return fill_integer<std::uint64_t>(to, op);
    case DType::Bool: return fill_bool(to, op);
    case DType::Complex64: return fill_complex<float>(to, op, flipped);
    case DType::Complex128: return fill_complex<double>(to, op, flipped);
  }
}

}  // namespace cohort::named
