#include <cohort/dtype.h>

namespace cohort {

std::string_view to_string(DType dtype) noexcept {
  constexpr std::string_view kNames[kDTypeCount] = {"float32", "float64", "float16", "bfloat16",  "int8",
                                                    "int16",   "int32",   "int64",   "uint8",     "uint16",
                                                    "uint32",  "uint64",  "bool",    "complex64", "complex128"};
  const auto index = static_cast<std::uint8_t>(dtype);
  return index < kDTypeCount ? kNames[index] : std::string_view("unknown");
}

std::string_view to_string(ReduceOp op) noexcept {
  constexpr std::string_view kNames[kReduceOpCount] = {"sum",     "average", "min",    "max",
                                                       "product", "bit_and", "bit_or", "bit_xor"};
  const auto index = static_cast<std::uint8_t>(op);
  return index < kReduceOpCount ? kNames[index] : std::string_view("unknown");
}

}  // namespace cohort
