// Addresses to listen at or connect to (TCP, or a name in Linux's abstract Unix namespace), and deadlines of waits.
// Plain data and pure functions; nothing here touches the network.
#pragma once

#include "base/result.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace cohort::net {

/// Host name or numeric address (IPv6 without brackets) and port.
struct Address {
  std::string host;
  std::uint16_t port = 0;
  bool operator==(const Address&) const = default;
};
/// For base/records.h.
void visit_fields(auto& m, auto& a, const Address*) { a(m.host, m.port); }

/// Parses "host:port" or "[v6]:port". Fails with InvalidArgument, which quotes the text.
Result<Address> parse_address(std::string_view text);
/// Formats the address as `parse_address` reads it.
std::string to_string(const Address& address);

/// True for "localhost", 127.0.0.0/8 and ::1, judged only by the spelling.
bool is_loopback_name(std::string_view host);

/// Either a Unix name or a TCP address: `unix_name` if it is not empty, else `tcp`.
struct Endpoint {
  Address tcp;
  std::string unix_name;  ///< name without the leading NUL; at most 100 bytes
  bool is_unix() const noexcept { return !unix_name.empty(); }
};

/// Returns 127.0.0.1 with port 0, for which the system chooses one.
Endpoint any_loopback_port();

/// Returns "127.0.0.1:4711" or "@name".
std::string to_string(const Endpoint& endpoint);

using Deadline = std::chrono::steady_clock::time_point;

inline Deadline deadline_in(std::chrono::milliseconds duration) { return std::chrono::steady_clock::now() + duration; }

/// Returns a timeout for poll(2): milliseconds until the deadline, rounded up; 0 if the deadline has passed; at most an
/// hour (callers loop).
inline int poll_timeout(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
}

inline std::chrono::nanoseconds time_left(Deadline deadline) {
  return std::max<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
}

inline bool passed(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }

}  // namespace cohort::net
