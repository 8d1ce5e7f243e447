// The addresses of this host, and at which of them peers may be met: all that can lead anywhere, the likeliest first,
// or those that COHORT_NETWORK names. Any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::net {

/// An address of an interface, as numbers.
struct InterfaceAddress {
  std::string interface;
  std::string text;                      ///< "10.0.0.7", "fd00::7"
  std::array<std::uint8_t, 16> bytes{};  ///< in the order of the network; 4 or 16 of them
  std::size_t length = 4;
  bool loopback = false;
};

/// One entry of COHORT_NETWORK: the name of an interface, or addresses that begin with the same bits.
struct NetworkFilter {
  std::string text;       ///< as it was written
  std::string interface;  ///< not empty: the name
  std::array<std::uint8_t, 16> bytes{};
  std::size_t length = 4;
  unsigned bits = 0;
};

/// "eth0,10.0.0.0/8,fd00::/8". InvalidArgument names the entry.
Result<std::vector<NetworkFilter>> parse_networks(std::string_view text);
bool fits(const InterfaceAddress& address, const NetworkFilter& filter) noexcept;

/// Addresses of this host, without those that only mean something on one link.
Result<std::vector<InterfaceAddress>> interface_addresses();

/// Orders them as peers should try them: by filter if there are any (Unavailable if none fits), else networks, then
/// bridges of containers and virtual machines, then loopback.
Result<std::vector<InterfaceAddress>> choose(std::vector<InterfaceAddress> all,
                                             const std::vector<NetworkFilter>& filters);

/// Addresses of this host that others should try, numeric: of `interface_addresses` those that COHORT_NETWORK allows,
/// in the order of `choose`, without loopback. May be empty.
Result<std::vector<std::string>> offered_addresses();

/// The address of this host, numeric, from which packets to `peer` go: one that the peer can answer. Sends nothing.
/// Unavailable: no way leads there.
Result<std::string> address_towards(const Address& peer);

}  // namespace cohort::net
