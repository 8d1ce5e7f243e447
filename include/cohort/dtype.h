// Element types and reduction operations that collectives understand. Plain data: any thread may use it.
#pragma once

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
};
inline constexpr int kDTypeCount = 12;

/// Reductions. The numbers travel in fingerprints: never change one, only append.
/// Average divides the sum, folded by ascending rank, once by the number of ranks; with unequal weights it folds each
/// value times its rank's share of their total. Integers wrap around in Sum and Product; Average of integers divides
/// the wrapped sum, rounding toward zero.
/// Min and Max of floating types give NaN where any rank brings NaN.
enum class ReduceOp : std::uint8_t { Sum = 0, Average = 1, Min = 2, Max = 3, Product = 4 };
inline constexpr int kReduceOpCount = 5;

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept {
  constexpr std::uint8_t kSizes[kDTypeCount] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8};
  return kSizes[static_cast<std::uint8_t>(dtype)];
}

constexpr bool is_floating(DType dtype) noexcept { return dtype <= DType::BFloat16; }

/// Names as torch writes them: "float32", "bfloat16", "int64", "uint8".
std::string_view to_string(DType dtype) noexcept;
/// "sum", "average", "min", "max", "product".
std::string_view to_string(ReduceOp op) noexcept;

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

}  // namespace cohort
