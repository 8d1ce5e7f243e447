#include "comm/join_offer.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <memory>

namespace cohort::comm {
namespace {

constexpr std::string_view kVersion = "1";
constexpr std::size_t kMostAddresses = 64;
constexpr char kHex[] = "0123456789abcdef";

tl::unexpected<Error> bad(std::string_view why) {
  return fail(ErrorCode::Corrupt,
              "what rank 0 left at the launcher's meeting place cannot be read: {} -- use the same "
              "build everywhere",
              why);
}

bool is_for_containers(std::string_view interface) {
  constexpr std::array<std::string_view, 10> kPrefixes = {"docker",  "br-",  "virbr", "veth",   "cni",
                                                          "flannel", "cali", "lxc",   "podman", "lxdbr"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](std::string_view prefix) { return interface.starts_with(prefix); });
}

// Empty if nobody else can reach it.
std::string text_of(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    const std::uint32_t number = ntohl(v4->sin_addr.s_addr);
    if ((number >> 24) == 127 || (number >> 16) == 0xa9fe) return {};
    ::inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
  } else if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) || IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) return {};
    ::inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
  }
  return text.data();
}

int digit(char c) {
  const auto found = std::string_view(kHex).find(c);
  return found == std::string_view::npos ? -1 : static_cast<int>(found);
}

}  // namespace

Result<std::string> encode(const JoinOffer& offer, std::size_t longest) {
  std::string text(kVersion);
  text += ';';
  for (const std::uint8_t byte : offer.secret.bytes()) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  std::size_t count = 0;
  for (const net::Address& address : offer.addresses) {
    const std::string next = ';' + net::to_string(address);
    if (text.size() + next.size() > longest || count == kMostAddresses) break;
    text += next;
    ++count;
  }
  if (count == 0) {
    return fail(ErrorCode::InvalidArgument,
                "no address of this host fits into the {} bytes that the launcher's meeting place takes", longest);
  }
  return text;
}

Result<JoinOffer> decode_offer(std::string_view text) {
  const auto next = [&] {
    const std::string_view part = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    return part;
  };
  if (next() != kVersion) return bad("another version");
  const std::string_view digits = next();
  std::array<std::uint8_t, net::Secret::kBytes> bytes{};
  if (digits.size() != 2 * bytes.size()) return bad("no secret");
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const int high = digit(digits[2 * i]);
    const int low = digit(digits[2 * i + 1]);
    if (high < 0 || low < 0) return bad("no secret");
    bytes[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  JoinOffer offer{net::Secret::from_bytes(bytes), {}};
  while (!text.empty()) {
    auto address = net::parse_address(next());
    if (!address) return bad(address.error().what());
    if (address->port == 0) return bad("a port of 0");
    offer.addresses.push_back(*std::move(address));
    if (offer.addresses.size() > kMostAddresses) return bad("too many addresses");
  }
  if (offer.addresses.empty()) return bad("no address");
  return offer;
}

Result<std::vector<std::string>> own_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return fail(ErrorCode::Io, "getifaddrs: {}", errno_text(errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> held(list, ::freeifaddrs);
  std::vector<std::string> likely;
  std::vector<std::string> unlikely;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    std::string text = text_of(entry->ifa_addr);
    if (!text.empty()) (is_for_containers(entry->ifa_name) ? unlikely : likely).push_back(std::move(text));
  }
  likely.insert(likely.end(), unlikely.begin(), unlikely.end());
  return likely;
}

}  // namespace cohort::comm
