#include "net/interfaces.h"

#include "base/env.h"
#include "base/parse.h"
#include "base/unique_fd.h"
#include "net/socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace cohort::net {
namespace {

// True for interfaces of containers and virtual machines. Their networks usually do not leave this host.
bool of_containers(std::string_view name) noexcept {
  for (const std::string_view prefix :
       {"docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "podman"}) {
    if (name.substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

int rank_of(const InterfaceAddress& address) noexcept {
  return address.loopback ? 2 : of_containers(address.interface) ? 1 : 0;
}

bool parse_bytes(const std::string& text, NetworkFilter& filter) noexcept {
  if (text.find('\0') != std::string::npos) return false;  // inet_pton would ignore everything after the NUL
  if (::inet_pton(AF_INET, text.c_str(), filter.bytes.data()) == 1) {
    filter.length = 4;
    return true;
  }
  filter.length = 16;
  return ::inet_pton(AF_INET6, text.c_str(), filter.bytes.data()) == 1;
}

}  // namespace

Result<std::vector<NetworkFilter>> parse_networks(std::string_view text) {
  std::vector<NetworkFilter> filters;
  while (!text.empty()) {
    const std::string entry(text.substr(0, text.find(',')));
    text.remove_prefix(std::min(text.size(), entry.size() + 1));
    if (entry.empty()) continue;
    NetworkFilter filter;
    filter.text = entry;
    const std::size_t slash = entry.find('/');
    const std::string address = entry.substr(0, slash);
    if (!parse_bytes(address, filter)) {
      if (slash != std::string::npos || entry.size() >= IF_NAMESIZE) {
        return fail(
            ErrorCode::InvalidArgument,
            "COHORT_NETWORK: '{}' is neither a network (as 10.0.0.0/8 or fd00::/8) nor the name of an interface",
            entry);
      }
      filter.interface = entry;
    } else {
      const auto most = static_cast<unsigned>(filter.length * 8);
      const auto bits = slash == std::string::npos ? std::optional<unsigned>(most)
                                                   : parse_integer<unsigned>(std::string_view(entry).substr(slash + 1));
      if (!bits || *bits > most) {
        return fail(ErrorCode::InvalidArgument, "COHORT_NETWORK: '{}' should end in a number of bits from 0 to {}",
                    entry, most);
      }
      filter.bits = *bits;
    }
    filters.push_back(std::move(filter));
  }
  return filters;
}

bool fits(const InterfaceAddress& address, const NetworkFilter& filter) noexcept {
  if (!filter.interface.empty()) return address.interface == filter.interface;
  if (address.length != filter.length) return false;
  for (unsigned bit = 0; bit < filter.bits; ++bit) {
    const auto mask = static_cast<std::uint8_t>(0x80u >> (bit % 8));
    if (((address.bytes[bit / 8] ^ filter.bytes[bit / 8]) & mask) != 0) return false;
  }
  return true;
}

Result<std::vector<InterfaceAddress>> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return fail(ErrorCode::Io, "getifaddrs: {}", errno_text(errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<InterfaceAddress> all;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    InterfaceAddress address;
    address.interface = entry->ifa_name;
    address.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    char text[INET6_ADDRSTRLEN] = "";
    if (entry->ifa_addr->sa_family == AF_INET) {
      sockaddr_in v4{};
      std::memcpy(&v4, entry->ifa_addr, sizeof v4);
      if (ntohl(v4.sin_addr.s_addr) >> 16 == 0xa9fe) continue;  // link-local: 169.254
      std::memcpy(address.bytes.data(), &v4.sin_addr, 4);
      ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      sockaddr_in6 v6{};
      std::memcpy(&v6, entry->ifa_addr, sizeof v6);
      if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) continue;
      address.length = 16;
      std::memcpy(address.bytes.data(), &v6.sin6_addr, 16);
      ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
    } else {
      continue;
    }
    address.text = text;
    all.push_back(std::move(address));
  }
  return all;
}

Result<std::vector<InterfaceAddress>> choose(std::vector<InterfaceAddress> all,
                                             const std::vector<NetworkFilter>& filters) {
  if (filters.empty()) {
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return rank_of(a) < rank_of(b); });
    return all;
  }
  std::vector<InterfaceAddress> chosen;
  for (const NetworkFilter& filter : filters) {
    for (const InterfaceAddress& address : all) {
      const bool known =
          std::any_of(chosen.begin(), chosen.end(), [&](const auto& c) { return c.text == address.text; });
      if (!known && fits(address, filter)) chosen.push_back(address);
    }
  }
  if (chosen.empty()) {
    std::string there;
    for (const InterfaceAddress& address : all) {
      there += fmt::format("{}{} ({})", there.empty() ? "" : ", ", address.text, address.interface);
    }
    std::string wanted;
    for (const NetworkFilter& filter : filters) wanted += (wanted.empty() ? "" : ",") + filter.text;
    return fail(ErrorCode::Unavailable, "COHORT_NETWORK={} fits no address of this host, which has {} -- correct it",
                wanted, there.empty() ? "none" : there);
  }
  return chosen;
}

Result<std::vector<std::string>> offered_addresses() {
  const auto filters = parse_networks(env::text(env::kNetwork));
  if (!filters) return tl::unexpected(filters.error());
  auto all = interface_addresses();
  if (!all) return tl::unexpected(all.error());
  std::erase_if(*all, [](const InterfaceAddress& address) { return address.loopback; });
  const auto chosen = choose(*std::move(all), *filters);
  if (!chosen) return tl::unexpected(chosen.error());
  std::vector<std::string> texts;
  for (const InterfaceAddress& address : *chosen) texts.push_back(address.text);
  return texts;
}

Result<std::string> address_towards(const Address& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int trouble = ::getaddrinfo(peer.host.c_str(), std::to_string(peer.port).c_str(), &hints, &found);
  if (trouble != 0) return fail(ErrorCode::Unavailable, "{}: {}", peer.host, ::gai_strerror(trouble));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  int error_number = EADDRNOTAVAIL;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const sys::UniqueFd socket(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket && ::connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0) {
      const auto own = local_endpoint(socket.get());
      if (!own) return tl::unexpected(own.error());
      return own->tcp.host;
    }
    error_number = errno;
  }
  return fail_system(error_number, ErrorCode::Unavailable, "no route from this host to {}: {}", to_string(peer),
                     errno_text(error_number));
}

}  // namespace cohort::net
