// The exchange before an agent on another host connects: between the agent and the starter that placed it there, over
// the stdin and stdout of the command in between (ssh, srun, mpirun). The agent announces itself in a line that differs
// from anything that a shell's start-up files print. Only then it gets the job's secret and the address to connect to.
// Pure. For launchers of one Slurm step: see `meet_in_step`.
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
  std::string build;  ///< compiler and build type, which must be the same on all hosts
  std::string host;
  std::string path;  ///< path of its executable
  bool operator==(const Announcement&) const = default;
};
/// Returns the announcement of this process.
Announcement own_announcement();
std::string to_line(const Announcement& announcement);
/// Returns nullopt if the line is no announcement.
std::optional<Announcement> parse_announcement(std::string_view line);
/// Says why `here` and `there` cannot be in one job; empty: they can.
std::string difference(const Announcement& here, const Announcement& there);

/// The supervisor's answer to an Announcement.
struct Invitation {
  net::Secret secret;
  int host_index = 0;
  std::vector<net::Endpoint> supervisor;
  std::chrono::milliseconds host_timeout = std::chrono::seconds(3);  ///< silence after which the job is lost
  std::vector<net::Endpoint> router = {};  ///< agent through which to reach the supervisor; empty: directly
  bool routes = false;                     ///< the agent is a router for others
};
/// The text holds the secret: `net::wipe` it.
std::string to_text(const Invitation& invitation);
/// Fails with Corrupt; the text is never part of the message.
Result<Invitation> parse_invitation(std::string_view text);
/// The last line of an invitation.
inline constexpr std::string_view kInvitationEnd = "go\n";

/// Lets the launchers of one Slurm step find each other: the launcher of task 0 hands a fresh secret and its addresses
/// to the others by means of Slurm (PMI, PMIx, MUNGE), as rank 0 does where srun starts the ranks themselves. Does this
/// in a child process, since a launcher may have no second thread, and only one process of a task may use PMI, once.
/// `mine`: task 0's offer for all others. Returns task 0's offer. For task 0 it may return before all others have
/// asked; the child goes on answering until the deadline, or until this process ends. Fails with Unavailable or Timeout
/// if they cannot find each other. To be called before this process has a second thread.
Result<rendezvous::InitOffer> meet_in_step(const rendezvous::Detected& step, const rendezvous::Environment& environment,
                                           const std::optional<rendezvous::InitOffer>& mine, net::Deadline deadline);

}  // namespace cohort::launch
