#include "net/address.h"

#include "base/parse.h"

#include <arpa/inet.h>

namespace cohort::net {
namespace {

tl::unexpected<Error> bad_address(std::string_view text, std::string_view why) {
  return fail(ErrorCode::InvalidArgument,
              "'{}' is not an address: {} -- write host:port or [IPv6]:port, as in node1:29500 or [::1]:29500", text,
              why);
}

}  // namespace

Result<Address> parse_address(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad_address(text, "there is no port");
  std::string_view host = text.substr(0, colon);
  const auto port = parse_integer<std::uint16_t>(text.substr(colon + 1));
  if (!port) return bad_address(text, "the port is not a number from 0 to 65535");
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    const std::string address(host.substr(0, host.find('%')));
    in6_addr ignored{};
    if (::inet_pton(AF_INET6, address.c_str(), &ignored) != 1)
      return bad_address(text, "no IPv6 address in the brackets");
  } else if (host.find(':') != std::string_view::npos) {
    return bad_address(text, "an IPv6 address has to stand in brackets");
  }
  if (host.empty()) return bad_address(text, "there is no host");
  if (host.size() > 255) return bad_address(text, "the host name is longer than 255 bytes");
  for (const char c : host) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '/' || c == '[' || c == ']' || c == 0x7f) {
      return bad_address(text, "a character that no host name has");
    }
  }
  return Address{std::string(host), *port};
}

std::string to_string(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", address.host, address.port) : fmt::format("{}:{}", address.host, address.port);
}

bool is_loopback_name(std::string_view host) {
  const std::string text(host);
  in_addr v4{};
  if (::inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (::inet_pton(AF_INET6, text.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost" || host == "ip6-localhost" || host.ends_with(".localhost");
}

Endpoint any_loopback_port() { return {{"127.0.0.1", 0}, {}}; }

std::string to_string(const Endpoint& endpoint) {
  return endpoint.is_unix() ? fmt::format("@{}", endpoint.unix_name) : to_string(endpoint.tcp);
}

}  // namespace cohort::net
