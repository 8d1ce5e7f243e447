// A TCP port for a job's own use, as MASTER_PORT and those of TF_CONFIG: outside the range from which the system gives
// ports to anyone, and locked against other jobs on this host for as long as the lease lives. The lock is a name in the
// kernel's abstract socket namespace, so it leaves no file and goes with its holder. All users of the host share the
// names, since they share the ports: who wants to keep others from them by their names could as well take the ports.
// Not thread-safe.
#pragma once

#include "base/result.h"
#include "sys/unique_fd.h"

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {

using PortRange = std::pair<std::uint16_t, std::uint16_t>;  ///< first and last

/// Ports above 10000 that are neither ephemeral nor reserved, as ranges. `ephemeral` and `reserved` are the texts of
/// net.ipv4.ip_local_port_range ("32768\t60999") and ip_local_reserved_ports ("8080,9000-9010").
std::vector<PortRange> usable_ports(std::string_view ephemeral, std::string_view reserved);

class PortLease {
 public:
  /// Starts looking at a place that `seed` decides. Fails with Unavailable if no port is free.
  static Result<PortLease> take(std::uint64_t seed);
  /// Of this port, wherever it is. Fails with Unavailable if somebody has it.
  static Result<PortLease> of(std::uint16_t port);
  std::uint16_t port() const noexcept { return port_; }

 private:
  PortLease(std::uint16_t port, sys::UniqueFd lock) : port_(port), lock_(std::move(lock)) {}
  std::uint16_t port_;
  sys::UniqueFd lock_;
};

}  // namespace cohort::launch
