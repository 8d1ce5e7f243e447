#include "named/integers.h"

#include <limits>
#include <type_traits>

namespace cohort::named {
namespace {

/// Calls `body` with a value of the buffer's integer type.
template <class Body>
void as_integers(const Buffer& data, const Body& body) {
  switch (data.dtype) {
    case DType::Int8: return body(std::int8_t{});
    case DType::Int16: return body(std::int16_t{});
    case DType::Int32: return body(std::int32_t{});
    case DType::Int64: return body(std::int64_t{});
    case DType::UInt8: return body(std::uint8_t{});
    case DType::UInt16: return body(std::uint16_t{});
    case DType::UInt32: return body(std::uint32_t{});
    case DType::UInt64: return body(std::uint64_t{});
    default: return;
  }
}

/// Toward zero, and into the range of T: a conversion of what lies outside has no meaning in C++.
template <class T>
T to_integer(double value) noexcept {
  // As a double the highest may be one too many, which is out of range just as well.
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(value);
}

}  // namespace

bool by_hand(const Signature& common, bool skips_ranks) noexcept {
  if (is_scalable(common.dtype)) return false;
  return common.prescale != 1 || common.postscale != 1 || (common.op == ReduceOp::Average && skips_ranks);
}

void divide(Buffer data, std::int64_t divisor) {
  as_integers(data, [&](auto kind) {
    using T = decltype(kind);
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    T* const values = static_cast<T*>(data.data);
    for (std::int64_t i = 0; i < data.count; ++i) {
      values[i] = static_cast<T>(static_cast<Wide>(values[i]) / static_cast<Wide>(divisor));
    }
  });
}

void scale(Buffer data, double factor, std::int64_t divisor) {
  if (factor == 1) {
    if (divisor != 1) divide(data, divisor);
    return;
  }
  as_integers(data, [&](auto kind) {
    using T = decltype(kind);
    T* const values = static_cast<T*>(data.data);
    const auto parts = static_cast<double>(divisor);
    // A division, since a sum that divides has to come out whole.
    for (std::int64_t i = 0; i < data.count; ++i) {
      values[i] = to_integer<T>(static_cast<double>(values[i]) * factor / parts);
    }
  });
}

}  // namespace cohort::named
