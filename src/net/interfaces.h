// The addresses of this host, and the ones that peers should try: all usable addresses, the likeliest first, or those
// that COHORT_NETWORK selects. Any thread.
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

/// A numeric address of an interface.
struct InterfaceAddress {
  std::string interface;
  std::string text;                      ///< "10.0.0.7", "fd00::7"
  std::array<std::uint8_t, 16> bytes{};  ///< in network byte order; `length` of them are used
  std::size_t length = 4;
  bool loopback = false;
};

/// One entry of COHORT_NETWORK: the name of an interface, or an address prefix.
struct NetworkFilter {
  std::string text;       ///< the entry as written by the user
  std::string interface;  ///< the interface's name; empty for a prefix
  std::array<std::uint8_t, 16> bytes{};
  std::size_t length = 4;
  unsigned bits = 0;
};

/// Parses a list such as "eth0,10.0.0.0/8,fd00::/8". Fails with InvalidArgument, which names the invalid entry.
Result<std::vector<NetworkFilter>> parse_networks(std::string_view text);
bool fits(const InterfaceAddress& address, const NetworkFilter& filter) noexcept;

/// Returns the addresses of this host, without link-local ones.
Result<std::vector<InterfaceAddress>> interface_addresses();

/// Orders addresses as peers should try them: with filters, only addresses that fit, in the order of the filters
/// (Unavailable if none fits); else networks, then bridges of containers and virtual machines, then loopback.
Result<std::vector<InterfaceAddress>> choose(std::vector<InterfaceAddress> all,
                                             const std::vector<NetworkFilter>& filters);

/// Returns the numeric addresses of this host that peers should try: `interface_addresses` that COHORT_NETWORK allows,
/// in the order of `choose`, without loopback. May be empty.
Result<std::vector<std::string>> offered_addresses();

/// Returns the numeric address of this host from which packets to `peer` are sent, so that the peer can answer. Sends
/// nothing. Fails with Unavailable if there is no route to the peer.
Result<std::string> address_towards(const Address& peer);

}  // namespace cohort::net
