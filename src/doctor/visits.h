// What one host of `cohort doctor` says to another first, and what is behind the second word: shared by the two halves
// of peers.h. Any thread.
#pragma once

#include "net/secure_connection.h"

#include <string_view>

namespace cohort::doctor {

inline constexpr std::string_view kProbe = "probe";
inline constexpr std::string_view kTransfer = "transfer";

inline net::SecureOptions between_hosts() {
  return {.purpose = "doctor", .longest_message = std::size_t{1} << 20, .detachable = true};
}

/// The other end of `measure`.
void receive_transfer(net::SecureConnection connection);

}  // namespace cohort::doctor
