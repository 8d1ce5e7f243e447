// Element types and reduction operations that collectives understand. Plain data: any thread may use it.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cohort {

/// Element types. The numbers travel in fingerprints and files: never change one, only append.
enum class DType : std::uint8_t {
  Float32 = 0,
  Float64 = 1,
  Float16 = 2,   ///< IEEE binary16; reduced in Float32, rounded once
  BFloat16 = 3,  ///< upper half of a Float32; reduced in Float32, rounded once
  Int8 = 4,
  Int16 = 5,
  Int32 = 6,
  Int64 = 7,
  UInt8 = 8,
  UInt16 = 9,
  UInt32 = 10,
  UInt64 = 11,
  Bool = 12,        ///< one byte; any byte but zero is true, and reductions write 0 or 1
  Complex64 = 13,   ///< two Float32, real part first
  Complex128 = 14,  ///< two Float64, real part first
};
inline constexpr int kDTypeCount = 15;

/// Format in which float32 travels between hosts, in sums and averages. The numbers are part of fingerprints: never
/// change one, only append. Formats with blocks have a scale for each block of consecutive elements of the sum.
enum class WireFormat : std::uint8_t {
  None = 0,      ///< as it is, 32 bits
  BFloat16 = 1,  ///< upper half of a float32, 16 bits: 8 binary digits of each value
  Int8 = 2,      ///< 8.125 bits, in blocks of 256: multiples of (the block's largest magnitude) / 127
  Int4 = 3,      ///< 4.125 bits, in blocks of 128: multiples of (the block's largest magnitude, or a little more) / 7
};
inline constexpr int kWireFormatCount = 4;

/// Reductions. The numbers are part of fingerprints: never change one, only append. Average divides the sum, folded as
/// in all_reduce, once by the number of ranks; with unequal weights, it folds each value times its rank's share of the
/// total weight. Integers wrap around in Sum and Product; Average of integers divides the wrapped sum, rounding toward
/// zero. Min and Max of floating types give NaN if any rank's value is NaN. For Bool, Sum, Max and BitOr are "or",
/// Product, Min and BitAnd are "and", and BitXor is "exclusive or". Complex numbers are added and averaged by
/// component; Product is (ac - bd, ad + bc), each operation rounded.
enum class ReduceOp : std::uint8_t {
  Sum = 0,
  Average = 1,
  Min = 2,
  Max = 3,
  Product = 4,
  BitAnd = 5,
  BitOr = 6,
  BitXor = 7,
  Mean = Average,
};
inline constexpr int kReduceOpCount = 8;

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept {
  constexpr std::uint8_t kSizes[kDTypeCount] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16};
  return kSizes[static_cast<std::uint8_t>(dtype)];
}

/// The four real floating types.
constexpr bool is_floating(DType dtype) noexcept { return dtype <= DType::BFloat16; }
constexpr bool is_complex(DType dtype) noexcept { return dtype == DType::Complex64 || dtype == DType::Complex128; }

/// True if operations on this type may have factors and weights: floating or complex.
constexpr bool is_scalable(DType dtype) noexcept { return is_floating(dtype) || is_complex(dtype); }

/// True if the reduction exists for the type. The bit operations are for integers and Bool, Min and Max for all but
/// complex, Average for all but Bool. False for numbers that name no type or no reduction.
constexpr bool supports(DType dtype, ReduceOp op) noexcept {
  if (static_cast<std::uint8_t>(dtype) >= kDTypeCount) return false;
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product: return true;
    case ReduceOp::Average: return dtype != DType::Bool;
    case ReduceOp::Min:
    case ReduceOp::Max: return !is_complex(dtype);
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor: return !is_scalable(dtype);
  }
  return false;
}

/// Names as torch writes them: "float32", "bfloat16", "int64", "uint8", "bool", "complex64".
std::string_view to_string(DType dtype) noexcept;
/// "sum", "average", "min", "max", "product", "bit_and", "bit_or", "bit_xor".
std::string_view to_string(ReduceOp op) noexcept;

/// "none", "bfloat16", "int8", "int4".
std::string_view to_string(WireFormat format) noexcept;

/// The DType of a C++ arithmetic type; ill-formed for types that have none.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::Float32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::Float64;
};
template <>
struct DTypeOf<std::int8_t> {
  static constexpr DType value = DType::Int8;
};
template <>
struct DTypeOf<std::int16_t> {
  static constexpr DType value = DType::Int16;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::Int32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::Int64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::UInt8;
};
template <>
struct DTypeOf<std::uint16_t> {
  static constexpr DType value = DType::UInt16;
};
template <>
struct DTypeOf<std::uint32_t> {
  static constexpr DType value = DType::UInt32;
};
template <>
struct DTypeOf<std::uint64_t> {
  static constexpr DType value = DType::UInt64;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::Bool;
};
template <>
struct DTypeOf<std::complex<float>> {
  static constexpr DType value = DType::Complex64;
};
template <>
struct DTypeOf<std::complex<double>> {
  static constexpr DType value = DType::Complex128;
};
static_assert(sizeof(bool) == 1);

}  // namespace cohort
