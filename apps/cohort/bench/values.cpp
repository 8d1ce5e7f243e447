#include "bench/values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>

namespace cohort::app::bench {
namespace {

std::uint32_t mixed(int rank, std::int64_t index) {
  std::uint32_t bits = (static_cast<std::uint32_t>(index) + 1) * 2654435761U;
  bits ^= (static_cast<std::uint32_t>(rank) + 7) * 2246822519U;
  return (bits ^ bits >> 13) * 3266489917U >> 9;
}

// Few different and small ones, so that a reduction over many ranks is exact in 16 bits.
int whole_number(DType dtype, ReduceOp op, int rank, std::int64_t index) {
  const std::uint32_t hash = mixed(rank, index);
  if (dtype == DType::Bool) return hash % 4 != 0 ? 1 : 0;
  switch (op) {
    case ReduceOp::Product:
      if (is_complex(dtype)) return static_cast<int>(hash % 4);  // a power of i
      return hash % 8 == 0 ? 2 : 1;
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor: return static_cast<int>(hash & 0x7F);
    default: return 1 + static_cast<int>(hash % 5);
  }
}

std::uint16_t bfloat16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Of 0 and of normal numbers above 0; here nothing else comes.
std::uint16_t float16_of(float value) {
  if (value == 0) return 0;
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);  // 0.5 to 1
  auto mantissa = static_cast<std::uint32_t>(std::nearbyint(fraction * 2048));
  if (mantissa == 2048) {
    mantissa = 1024;
    ++exponent;
  }
  if (exponent > 16) return 0x7C00;
  return static_cast<std::uint16_t>(static_cast<std::uint32_t>(exponent + 14) << 10 | (mantissa & 0x3FF));
}

template <class T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void encode_real(std::byte* to, DType dtype, double value) {
  switch (dtype) {
    case DType::Float64: return put(to, value);
    case DType::Float16: return put(to, float16_of(static_cast<float>(value)));
    case DType::BFloat16: return put(to, bfloat16_of(static_cast<float>(value)));
    default: return put(to, static_cast<float>(value));
  }
}

void encode_complex(std::byte* to, DType dtype, std::complex<double> value) {
  const DType part = dtype == DType::Complex64 ? DType::Float32 : DType::Float64;
  encode_real(to, part, value.real());
  encode_real(to + size_of(part), part, value.imag());
}

void encode_integer(std::byte* to, DType dtype, std::int64_t value) {
  switch (size_of(dtype)) {
    case 1: return put(to, static_cast<std::uint8_t>(value));
    case 2: return put(to, static_cast<std::uint16_t>(value));
    case 4: return put(to, static_cast<std::uint32_t>(value));
    default: return put(to, value);
  }
}

/// As the type holds it after wrapping around.
std::int64_t wrapped(DType dtype, std::int64_t value) {
  switch (dtype) {
    case DType::Int8: return static_cast<std::int8_t>(value);
    case DType::Int16: return static_cast<std::int16_t>(value);
    case DType::Int32: return static_cast<std::int32_t>(value);
    case DType::UInt8: return static_cast<std::uint8_t>(value);
    case DType::UInt16: return static_cast<std::uint16_t>(value);
    case DType::UInt32: return static_cast<std::uint32_t>(value);
    default: return value;
  }
}

std::complex<double> complex_number(ReduceOp op, int whole) {
  if (op != ReduceOp::Product) return {static_cast<double>(whole), static_cast<double>(whole % 2)};
  constexpr double kReal[] = {1, 0, -1, 0};
  constexpr double kImaginary[] = {0, 1, 0, -1};
  return {kReal[whole % 4], kImaginary[whole % 4]};
}

/// One rounding, in the precision in which the type is accumulated.
double averaged(DType dtype, double sum, int ranks) {
  if (dtype == DType::Float64 || dtype == DType::Complex128) return sum / ranks;
  return static_cast<double>(static_cast<float>(sum) / static_cast<float>(ranks));
}

std::int64_t reduced_integer(DType dtype, ReduceOp op, int ranks, std::int64_t index) {
  std::int64_t result = whole_number(dtype, op, 0, index);
  const bool logic = dtype == DType::Bool;
  for (int rank = 1; rank < ranks; ++rank) {
    const std::int64_t value = whole_number(dtype, op, rank, index);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average: result = logic ? (result | value) : wrapped(dtype, result + value); break;
      case ReduceOp::Product: result = wrapped(dtype, result * value); break;
      case ReduceOp::Min: result = std::min(result, value); break;
      case ReduceOp::Max: result = std::max(result, value); break;
      case ReduceOp::BitAnd: result &= value; break;
      case ReduceOp::BitOr: result |= value; break;
      case ReduceOp::BitXor: result ^= value; break;
    }
  }
  return op == ReduceOp::Average ? result / ranks : result;
}

double reduced_real(DType dtype, ReduceOp op, int ranks, std::int64_t index) {
  double result = whole_number(dtype, op, 0, index);
  for (int rank = 1; rank < ranks; ++rank) {
    const double value = whole_number(dtype, op, rank, index);
    switch (op) {
      case ReduceOp::Product: result *= value; break;
      case ReduceOp::Min: result = std::min(result, value); break;
      case ReduceOp::Max: result = std::max(result, value); break;
      default: result += value;
    }
  }
  return op == ReduceOp::Average ? averaged(dtype, result, ranks) : result;
}

// In the order and by the formula of the reductions, so that zeros have their sign.
std::complex<double> reduced_complex(DType dtype, ReduceOp op, int ranks, std::int64_t index) {
  std::complex<double> result = complex_number(op, whole_number(dtype, op, 0, index));
  for (int rank = 1; rank < ranks; ++rank) {
    const std::complex<double> value = complex_number(op, whole_number(dtype, op, rank, index));
    const double a = result.real(), b = result.imag(), c = value.real(), d = value.imag();
    result = op == ReduceOp::Product ? std::complex<double>(a * c - b * d, a * d + b * c) : result + value;
  }
  if (op == ReduceOp::Average) {
    return {averaged(dtype, result.real(), ranks), averaged(dtype, result.imag(), ranks)};
  }
  return result;
}

}  // namespace

Tile input_tile(DType dtype, ReduceOp op, int rank) {
  const std::size_t element = size_of(dtype);
  Tile tile(static_cast<std::size_t>(kPeriod) * element);
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    std::byte* const to = tile.data() + static_cast<std::size_t>(i) * element;
    const int whole = whole_number(dtype, op, rank, i);
    if (is_complex(dtype)) {
      encode_complex(to, dtype, complex_number(op, whole));
    } else if (is_floating(dtype)) {
      encode_real(to, dtype, whole);
    } else {
      encode_integer(to, dtype, whole);
    }
  }
  return tile;
}

Tile reduced_tile(DType dtype, ReduceOp op, int ranks) {
  const std::size_t element = size_of(dtype);
  Tile tile(static_cast<std::size_t>(kPeriod) * element);
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    std::byte* const to = tile.data() + static_cast<std::size_t>(i) * element;
    if (is_complex(dtype)) {
      encode_complex(to, dtype, reduced_complex(dtype, op, ranks, i));
    } else if (is_floating(dtype)) {
      encode_real(to, dtype, reduced_real(dtype, op, ranks, i));
    } else {
      encode_integer(to, dtype, reduced_integer(dtype, op, ranks, i));
    }
  }
  return tile;
}

namespace {

/// Calls `piece(offset in the buffer, offset in the tile, bytes)` for each stretch of one period.
template <class Piece>
void for_each_piece(std::int64_t count, DType dtype, std::int64_t first, Piece piece) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t at = 0; at < count;) {
    const std::int64_t place = (first + at) % kPeriod;
    const std::int64_t length = std::min(kPeriod - place, count - at);
    piece(static_cast<std::size_t>(at * element), static_cast<std::size_t>(place * element),
          static_cast<std::size_t>(length * element));
    at += length;
  }
}

}  // namespace

void fill(void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first) {
  std::byte* const to = static_cast<std::byte*>(data);
  for_each_piece(count, dtype, first, [&](std::size_t at, std::size_t place, std::size_t bytes) {
    std::memcpy(to + at, tile.data() + place, bytes);
  });
}

std::int64_t count_wrong(const void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first) {
  const std::byte* const found = static_cast<const std::byte*>(data);
  const std::size_t element = size_of(dtype);
  std::int64_t wrong = 0;
  for_each_piece(count, dtype, first, [&](std::size_t at, std::size_t place, std::size_t bytes) {
    if (std::memcmp(found + at, tile.data() + place, bytes) == 0) return;
    for (std::size_t i = 0; i < bytes; i += element) {
      wrong += std::memcmp(found + at + i, tile.data() + place + i, element) != 0 ? 1 : 0;
    }
  });
  return wrong;
}

}  // namespace cohort::app::bench
