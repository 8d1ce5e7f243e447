// Which transports there are between hosts, and their names. Pure; any thread.
#pragma once

#include "base/result.h"

#include <cstdint>
#include <string_view>

namespace cohort::transport {

enum class TransportKind : std::uint8_t { Tcp, Mpi };

constexpr std::string_view name_of(TransportKind kind) noexcept { return kind == TransportKind::Mpi ? "mpi" : "tcp"; }

/// Empty: tcp. `from` is named where the text is neither.
inline Result<TransportKind> parse_transport(std::string_view text, std::string_view from) {
  if (text.empty() || text == "tcp") return TransportKind::Tcp;
  if (text == "mpi") return TransportKind::Mpi;
  return fail(ErrorCode::InvalidArgument, "{}='{}': there is no such transport -- give tcp or mpi", from, text);
}

}  // namespace cohort::transport
