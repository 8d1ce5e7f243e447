#include "train/formats/tensor.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace cohort::formats {
namespace {

constexpr std::array<ElementTypeInfo, kElementTypeCount> kTypes = {{
    {ElementType::Float64, 8, "F64", "float64", "DoubleStorage"},
    {ElementType::Float32, 4, "F32", "float32", "FloatStorage"},
    {ElementType::Float16, 2, "F16", "float16", "HalfStorage"},
    {ElementType::BFloat16, 2, "BF16", "bfloat16", "BFloat16Storage"},
    {ElementType::Int64, 8, "I64", "int64", "LongStorage"},
    {ElementType::Int32, 4, "I32", "int32", "IntStorage"},
    {ElementType::Int16, 2, "I16", "int16", "ShortStorage"},
    {ElementType::Int8, 1, "I8", "int8", "CharStorage"},
    {ElementType::UInt64, 8, "U64", "uint64", ""},
    {ElementType::UInt32, 4, "U32", "uint32", ""},
    {ElementType::UInt16, 2, "U16", "uint16", ""},
    {ElementType::UInt8, 1, "U8", "uint8", "ByteStorage"},
    {ElementType::Bool, 1, "BOOL", "bool", "BoolStorage"},
    {ElementType::Complex64, 8, "C64", "complex64", "ComplexFloatStorage"},
    {ElementType::Float8E4M3, 1, "F8_E4M3", "float8_e4m3fn", ""},
    {ElementType::Float8E5M2, 1, "F8_E5M2", "float8_e5m2", ""},
}};

const ElementTypeInfo* find(std::string_view ElementTypeInfo::*field, std::string_view name) noexcept {
  const auto* const row =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& type) { return type.*field == name; });
  return row == kTypes.end() || name.empty() ? nullptr : row;
}

}  // namespace

const ElementTypeInfo& info(ElementType type) noexcept { return kTypes[static_cast<std::size_t>(type)]; }
const ElementTypeInfo* find_safetensors_type(std::string_view name) noexcept {
  return find(&ElementTypeInfo::safetensors, name);
}
const ElementTypeInfo* find_torch_type(std::string_view name) noexcept { return find(&ElementTypeInfo::torch, name); }
const ElementTypeInfo* find_torch_storage(std::string_view name) noexcept {
  return find(&ElementTypeInfo::torch_storage, name);
}

std::optional<std::int64_t> element_count(std::span<const std::int64_t> shape) noexcept {
  // An overflow is refused for empty tensors, too, like in torch, which multiplies all dimensions.
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(count, dimension, &count)) return std::nullopt;
  }
  return count;
}

std::optional<std::uint64_t> byte_count(ElementType type, std::span<const std::int64_t> shape) noexcept {
  const auto elements = element_count(shape);
  std::int64_t bytes = 0;
  if (!elements || __builtin_mul_overflow(*elements, static_cast<std::int64_t>(info(type).bytes), &bytes))
    return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace cohort::formats
