// What an agent and the starter that placed it on another host say to each other over the stdin and stdout of the
// command in between (ssh, srun, mpirun), before the agent connects: the agent announces itself in a line, which stands
// out among whatever a shell's start-up files print, and only then is told the job's secret and where to connect. Pure.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// An agent's first line.
struct Announcement {
  std::uint32_t protocol = 0;
  std::string version;
  std::string build;  ///< what has to be the same on all hosts: compiler, kind, libtorch
  std::string host;
  std::string path;  ///< of its executable
  bool operator==(const Announcement&) const = default;
};
/// Of this process.
Announcement own_announcement();
std::string to_line(const Announcement& announcement);
/// Nullopt if the line is none.
std::optional<Announcement> parse_announcement(std::string_view line);
/// Why both cannot be in one job; empty: they can.
std::string difference(const Announcement& here, const Announcement& there);

/// The answer.
struct Invitation {
  net::Secret secret;
  int host_index = 0;
  std::vector<net::Endpoint> supervisor;
  std::chrono::milliseconds host_timeout = std::chrono::seconds(3);  ///< of silence, after which the job is lost
};
/// Holds the secret: `net::wipe` it.
std::string to_text(const Invitation& invitation);
/// Fails with Corrupt; the text never appears in the message.
Result<Invitation> parse_invitation(std::string_view text);
/// The last line of an invitation.
inline constexpr std::string_view kInvitationEnd = "go\n";

}  // namespace cohort::launch
