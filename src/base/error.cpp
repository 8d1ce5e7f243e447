#include <cohort/error.h>

#include <utility>

namespace cohort {

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

}  // namespace cohort
