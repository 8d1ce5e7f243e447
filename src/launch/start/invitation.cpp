#include "launch/start/invitation.h"

#include "base/parse.h"
#include "launch/messages.h"
#include "launch/version.h"
#include "sys/hardware.h"
#include "sys/process.h"

#include <cstddef>

namespace cohort::launch {
namespace {

constexpr std::string_view kMark = "cohort-agent-is-here";
constexpr std::size_t kMostAddresses = 64;

/// Tabs and line ends divide.
std::string plain(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  return text;
}

std::optional<std::string_view> after(std::string_view line, std::string_view word) {
  if (!line.starts_with(word) || line.size() <= word.size() || line[word.size()] != ' ') return std::nullopt;
  return line.substr(word.size() + 1);
}

}  // namespace

Announcement own_announcement() {
  Announcement out;
  out.protocol = kProtocol;
  out.version = kVersion;
  out.build = fmt::format("{}, {}{}", kCompiler, kBuildType,
                          kTorchVersion.empty() ? std::string() : fmt::format(", libtorch {}", kTorchVersion));
  out.host = sys::host_name();
  out.path = sys::own_executable().value_or("?");
  return out;
}

std::string to_line(const Announcement& announcement) {
  return fmt::format("{}\t{}\t{}\t{}\t{}\t{}", kMark, announcement.protocol, plain(announcement.version),
                     plain(announcement.build), plain(announcement.host), plain(announcement.path));
}

std::optional<Announcement> parse_announcement(std::string_view line) {
  const auto mark = line.find(kMark);
  if (mark == std::string_view::npos) return std::nullopt;
  line.remove_prefix(mark);
  if (line.ends_with('\r')) line.remove_suffix(1);
  std::vector<std::string_view> fields;
  while (true) {
    const auto tab = line.find('\t');
    fields.push_back(line.substr(0, tab));
    if (tab == std::string_view::npos) break;
    line.remove_prefix(tab + 1);
  }
  if (fields.size() != 6 || fields[0] != kMark) return std::nullopt;
  const auto protocol = parse_integer<std::uint32_t>(fields[1]);
  if (!protocol) return std::nullopt;
  return Announcement{*protocol, std::string(fields[2]), std::string(fields[3]), std::string(fields[4]),
                      std::string(fields[5])};
}

std::string difference(const Announcement& here, const Announcement& there) {
  const auto differ = [&](std::string_view what, std::string_view ours, std::string_view theirs) {
    return fmt::format(
        "{} is {} on {} ({}) and {} on {} ({}); install the same one on all hosts, or name it with "
        "--remote-cohort",
        what, theirs, there.host, there.path, ours, here.host, here.path);
  };
  if (here.version != there.version) return differ("Cohort", here.version, there.version);
  if (here.protocol != there.protocol)
    return differ("Cohort's protocol", std::to_string(here.protocol), std::to_string(there.protocol));
  if (here.build != there.build) return differ("Cohort's build", here.build, there.build);
  return {};
}

std::string to_text(const Invitation& invitation) {
  std::string rest = fmt::format("\nhost {}\nsilence {}\n", invitation.host_index, invitation.host_timeout.count());
  for (const net::Endpoint& endpoint : invitation.supervisor) rest += "address " + net::to_string(endpoint.tcp) + "\n";
  rest += kInvitationEnd;
  std::string text = "secret ";
  text.reserve(text.size() + 2 * net::Secret::kBytes + rest.size());
  invitation.secret.append_digits(text);
  return text += rest;
}

Result<Invitation> parse_invitation(std::string_view text) {
  std::optional<net::Secret> secret;
  std::optional<int> host, silence;
  std::vector<net::Endpoint> supervisor;
  if (!text.ends_with(kInvitationEnd)) return fail(ErrorCode::Corrupt, "the invitation has no end");
  text.remove_suffix(kInvitationEnd.size());
  while (!text.empty()) {
    const auto end = text.find('\n');
    if (end == std::string_view::npos) return fail(ErrorCode::Corrupt, "the invitation's last line has no end");
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (const auto digits = after(line, "secret"); digits && !secret) {
      secret = net::Secret::from_digits(*digits);
      if (!secret) return fail(ErrorCode::Corrupt, "the invitation's secret is none");
    } else if (const auto number = after(line, "host"); number && !host) {
      host = parse_integer<int>(*number);
      if (!host || *host < 0) return fail(ErrorCode::Corrupt, "the invitation's host is no number");
    } else if (const auto limit = after(line, "silence"); limit && !silence) {
      silence = parse_integer<int>(*limit);
      if (!silence || *silence < 1) return fail(ErrorCode::Corrupt, "the invitation's limit of silence is no number");
    } else if (const auto address = after(line, "address"); address && supervisor.size() < kMostAddresses) {
      auto parsed = net::parse_address(*address);
      if (!parsed) return fail(ErrorCode::Corrupt, "an address of the invitation is none");
      supervisor.push_back({*parsed, {}});
    } else {
      return fail(ErrorCode::Corrupt, "the invitation has a line that is not understood");
    }
  }
  if (!secret || !host || !silence || supervisor.empty())
    return fail(ErrorCode::Corrupt, "the invitation is not complete");
  return Invitation{*secret, *host, std::move(supervisor), std::chrono::milliseconds(*silence)};
}

}  // namespace cohort::launch
