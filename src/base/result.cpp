#include "base/result.h"

#include <cohort/dtype.h>
#include <cohort/error.h>

#include <utility>

namespace cohort {

std::string errno_text(int error_number) {
  const char* description = strerrordesc_np(error_number);
  const char* name = strerrorname_np(error_number);
  return fmt::format("{} ({})", description != nullptr ? description : "unknown error",
                     name != nullptr ? std::string(name) : std::to_string(error_number));
}

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::InvalidArgument: return "InvalidArgument";
    case ErrorCode::Unavailable: return "Unavailable";
    case ErrorCode::Timeout: return "Timeout";
    case ErrorCode::PeerLost: return "PeerLost";
    case ErrorCode::Mismatch: return "Mismatch";
    case ErrorCode::Aborted: return "Aborted";
    case ErrorCode::Io: return "Io";
    case ErrorCode::Corrupt: return "Corrupt";
    case ErrorCode::NonFinite: return "NonFinite";
    case ErrorCode::Internal: return "Internal";
  }
  return "Unknown";
}

Error::Error(ErrorCode code, const std::string& message, ErrorContext context)
    : std::runtime_error(message), code_(code), context_(std::move(context)) {}

std::string_view to_string(DType dtype) noexcept {
  constexpr std::string_view kNames[kDTypeCount] = {"float32", "float64", "float16", "bfloat16",  "int8",
                                                    "int16",   "int32",   "int64",   "uint8",     "uint16",
                                                    "uint32",  "uint64",  "bool",    "complex64", "complex128"};
  const auto index = static_cast<std::uint8_t>(dtype);
  return index < kDTypeCount ? kNames[index] : std::string_view("unknown");
}

std::string_view to_string(WireFormat format) noexcept {
  constexpr std::string_view kNames[kWireFormatCount] = {"none", "bfloat16", "int8", "int4"};
  const auto number = static_cast<std::size_t>(format);
  return number < kWireFormatCount ? kNames[number] : "?";
}

std::string_view to_string(ReduceOp op) noexcept {
  constexpr std::string_view kNames[kReduceOpCount] = {"sum",     "average", "min",    "max",
                                                       "product", "bit_and", "bit_or", "bit_xor"};
  const auto index = static_cast<std::uint8_t>(op);
  return index < kReduceOpCount ? kNames[index] : std::string_view("unknown");
}

}  // namespace cohort
