#include "cluster/host_text.h"

#include <arpa/inet.h>

#include <algorithm>
#include <string>

namespace cohort::cluster {

tl::unexpected<Error> text_error(const NamedText& text, std::size_t offset, std::string_view why) {
  constexpr std::size_t kShown = 30;
  const std::size_t begin = text.text.size() <= 3 * kShown || offset < kShown ? 0 : offset - kShown;
  const std::size_t end =
      text.text.size() <= 3 * kShown ? text.text.size() : std::min(text.text.size(), begin + 2 * kShown);
  std::string shown = begin > 0 ? "..." : "";
  // The texts come from anywhere: a message stays one line of printable characters.
  for (const char c : text.text.substr(begin, end - begin)) {
    const auto byte = static_cast<unsigned char>(c);
    shown += byte < ' ' || byte == 0x7f ? '?' : c;
  }
  if (end < text.text.size()) shown += "...";
  return fail(ErrorCode::InvalidArgument, "{} '{}': {} at character {} -- {}", text.what, shown, why, offset + 1,
              text.advice);
}

bool is_host_character(char c) noexcept {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
}

std::string_view fault_of_host(std::string_view host) {
  if (host.empty()) return "there is no host name";
  if (host.size() > 255) return "a host name longer than 255 bytes";
  if (host.find(':') != std::string_view::npos) {
    const std::size_t percent = host.find('%');
    const std::string address(host.substr(0, percent));
    in6_addr ignored{};
    // inet_pton reads up to the first NUL, whatever comes behind it.
    if (address.find('\0') != std::string::npos || ::inet_pton(AF_INET6, address.c_str(), &ignored) != 1)
      return "an address that is no IPv6 address";
    if (percent == std::string_view::npos) return {};
    const std::string_view scope = host.substr(percent + 1);
    const bool good = !scope.empty() && std::all_of(scope.begin(), scope.end(), is_host_character);
    return good ? std::string_view() : "an IPv6 address with a scope that is no interface's name";
  }
  if (host.front() == '-') return "a host name that begins with '-'";
  if (!std::all_of(host.begin(), host.end(), is_host_character)) return "a character that no host name has";
  return {};
}

}  // namespace cohort::cluster
