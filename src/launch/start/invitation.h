// The exchange before an agent connects. To another host: between an agent and the starter that placed it there, over
// the stdin and stdout of the command in between (ssh, srun, mpirun). The agent announces itself in a line, which
// stands out among whatever a shell's start-up files print, and only then gets the job's secret and where to connect.
// Pure. Among the launchers of one Slurm step: see `meet_in_step`.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "rendezvous/detect.h"
#include "rendezvous/place.h"

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
  std::string build;  ///< what has to be the same on all hosts: compiler, kind
  std::string host;
  std::string path;  ///< of its executable
  bool operator==(const Announcement&) const = default;
};
/// The announcement of this process.
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

/// How the launchers of one Slurm step find each other: the one of task 0 hands a fresh secret and its addresses to the
/// others through what Slurm gives its tasks (PMI, PMIx, MUNGE), as rank 0 does where srun starts the ranks themselves.
/// It happens in a child: a launcher may have no second thread, and PMI is for one process of a task, once.
/// Of task 0, `mine`; to be told to all others. Returns what task 0 gave. For task 0 it may return before all others
/// have asked: the child goes on telling them until the deadline, or until this process ends. Unavailable or Timeout
/// where they cannot find each other. Call it before this process has a second thread.
Result<rendezvous::JoinOffer> meet_in_step(const rendezvous::Detected& step, const rendezvous::Environment& environment,
                                           const std::optional<rendezvous::JoinOffer>& mine, net::Deadline deadline);

}  // namespace cohort::launch
