// Element types and tensors in the format of files: little-endian, row-major. Plain data; bytes are not owned.
// A Sink takes the output of a format's writer, front to back, for a file, a digest or memory. Not thread-safe.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::formats {

/// Has more types than cohort::DType, since files hold types that collectives do not reduce.
enum class ElementType : std::uint8_t {
  Float64,
  Float32,
  Float16,
  BFloat16,
  Int64,
  Int32,
  Int16,
  Int8,
  UInt64,
  UInt32,
  UInt16,
  UInt8,
  Bool,
  Complex64,
  Float8E4M3,
  Float8E5M2,
};
inline constexpr int kElementTypeCount = 16;

struct ElementTypeInfo {
  ElementType type;
  std::size_t bytes;
  std::string_view safetensors;    ///< "BF16"
  std::string_view torch;          ///< the name in Python's module torch: "bfloat16"
  std::string_view torch_storage;  ///< "BFloat16Storage"; empty for types that torch saves as untyped storages
};

const ElementTypeInfo& info(ElementType type) noexcept;
/// Find a type by its name in safetensors, its name in torch, or its torch storage's name; nullptr if unknown.
const ElementTypeInfo* find_safetensors_type(std::string_view name) noexcept;
const ElementTypeInfo* find_torch_type(std::string_view name) noexcept;
const ElementTypeInfo* find_torch_storage(std::string_view name) noexcept;

struct TensorView {
  ElementType type = ElementType::Float32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  ///< row-major without gaps
};

struct NamedTensor {
  std::string name;
  TensorView tensor;
};

/// Returns the number of elements; nullopt if a dimension is negative or the product overflows int64.
std::optional<std::int64_t> element_count(std::span<const std::int64_t> shape) noexcept;
/// Returns the number of bytes; nullopt if element_count returns nullopt or the product overflows.
std::optional<std::uint64_t> byte_count(ElementType type, std::span<const std::int64_t> shape) noexcept;
/// Returns "[2, 3]".
std::string shape_text(std::span<const std::int64_t> shape);
/// True for well-formed UTF-8 (RFC 3629).
bool is_utf8(std::string_view text) noexcept;

using Sink = std::function<Result<void>(std::span<const std::byte>)>;

inline std::span<const std::byte> as_bytes(std::string_view text) noexcept {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace cohort::formats
