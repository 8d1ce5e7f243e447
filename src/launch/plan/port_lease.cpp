#include "launch/plan/port_lease.h"

#include "base/parse.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

namespace cohort::launch {
namespace {

constexpr std::uint32_t kLowest = 10000;
constexpr std::uint32_t kHighest = 65535;

std::string read_text(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

sys::UniqueFd lock_name(std::uint16_t port) {
  sys::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("cohort-port-{}", port);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) fd.reset();
  return fd;
}

bool bind_works(int family, const sockaddr* address, socklen_t size) {
  const sys::UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return true;  // no such protocol here: nobody can hold it
  const int on = 1;
  // As every server does; only a listener or another user of the port is in the way then, no old connection.
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  return ::bind(fd.get(), address, size) == 0;
}

bool is_free(std::uint16_t port) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  return bind_works(AF_INET, reinterpret_cast<const sockaddr*>(&v4), sizeof v4) &&
         bind_works(AF_INET6, reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
}

}  // namespace

std::vector<PortRange> usable_ports(std::string_view ephemeral, std::string_view reserved) {
  std::vector<bool> usable(kHighest + 1, false);
  std::fill(usable.begin() + kLowest, usable.end(), true);
  const auto exclude = [&usable](std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t port = first; port <= std::min(last, kHighest); ++port) usable[port] = false;
  };
  const auto trimmed = [](std::string_view text) {
    const auto begin = text.find_first_not_of(" \t\n");
    if (begin == std::string_view::npos) return std::string_view();
    return text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
  };
  const std::string_view range = trimmed(ephemeral);
  const auto gap = range.find_first_of(" \t");
  std::optional<std::uint32_t> low;
  std::optional<std::uint32_t> high;
  if (gap != std::string_view::npos) {
    low = parse_integer<std::uint32_t>(range.substr(0, gap));
    high = parse_integer<std::uint32_t>(trimmed(range.substr(gap)));
  }
  exclude(low.value_or(32768), high.value_or(60999));
  std::string_view rest = trimmed(reserved);
  while (!rest.empty()) {
    const auto comma = std::min(rest.find(','), rest.size());
    const std::string_view item = rest.substr(0, comma);
    const auto dash = std::min(item.find('-'), item.size());
    const auto first = parse_integer<std::uint32_t>(item.substr(0, dash));
    const auto last = dash == item.size() ? first : parse_integer<std::uint32_t>(item.substr(dash + 1));
    if (first && last) exclude(*first, *last);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  std::vector<PortRange> ranges;
  for (std::uint32_t port = kLowest; port <= kHighest; ++port) {
    if (!usable[port]) continue;
    if (!ranges.empty() && ranges.back().second == port - 1)
      ranges.back().second = static_cast<std::uint16_t>(port);
    else
      ranges.emplace_back(static_cast<std::uint16_t>(port), static_cast<std::uint16_t>(port));
  }
  return ranges;
}

Result<PortLease> PortLease::of(std::uint16_t port) {
  sys::UniqueFd lock = lock_name(port);
  if (lock && is_free(port)) return PortLease(port, std::move(lock));
  return fail(ErrorCode::Unavailable, "port {} is in use", port);
}

Result<PortLease> PortLease::take(std::uint64_t seed) {
  const auto ranges = usable_ports(read_text("/proc/sys/net/ipv4/ip_local_port_range"),
                                   read_text("/proc/sys/net/ipv4/ip_local_reserved_ports"));
  std::uint64_t total = 0;
  for (const auto& [first, last] : ranges) total += static_cast<std::uint64_t>(last - first) + 1;
  for (std::uint64_t step = 0; step < total; ++step) {
    std::uint64_t index = (seed + step) % total;
    for (const auto& [first, last] : ranges) {
      const std::uint64_t size = static_cast<std::uint64_t>(last - first) + 1;
      if (index >= size) {
        index -= size;
        continue;
      }
      const auto port = static_cast<std::uint16_t>(first + index);
      sys::UniqueFd lock = lock_name(port);
      if (lock && is_free(port)) return PortLease(port, std::move(lock));
      break;
    }
  }
  return fail(ErrorCode::Unavailable,
              "no port for the job: none of the {} above {} that net.ipv4.ip_local_port_range leaves is free", total,
              kLowest);
}

}  // namespace cohort::launch
