// Places one agent on a host. A starter is the only part that knows how a host is reached; what it returns looks the
// same for every kind: a process on this host that ends when the agent has ended, and a lifeline that tells the agent,
// by its end, that the supervisor is gone. Starters keep no state; the agent pool's thread calls them.
#pragma once

#include "base/result.h"
#include "launch/plan/plan.h"
#include "net/address.h"
#include "net/secret.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

struct AgentProcess {
  sys::ChildProcess process;
  sys::UniqueFd lifeline;  ///< write end; over a command an invitation is written, and nothing after it
  // What the command in between says; empty where there is none.
  sys::UniqueFd out;
  sys::UniqueFd err;
};

/// On this host: `cohort agent` in a session of its own, the secret in an inherited sealed memory file. `input_fd`: to
/// be rank 0's stdin; -1: none.
Result<AgentProcess> start_local_agent(const PlannedHost& host, const net::Endpoint& supervisor,
                                       const net::Secret& secret, int input_fd);

/// How other hosts are reached. By hand: somebody runs `cohort agent --join` there. Launcher: somebody runs `cohort
/// run` there, too, as the launcher of another node (nodes.h). Owner: the process that the job belongs to has agents
/// started, which say themselves where they are and how many ranks they take.
enum class StartMethod { Ssh, Slurm, Mpi, Hand, Launcher, Owner };

/// An agent says where it is and how many ranks it takes.
constexpr bool says_itself(StartMethod method) {
  return method == StartMethod::Launcher || method == StartMethod::Owner;
}

/// Who is on other hosts comes by itself, at no command of ours.
constexpr bool comes_by_itself(StartMethod method) { return method == StartMethod::Hand || says_itself(method); }

struct RemoteOptions {
  StartMethod method = StartMethod::Ssh;
  std::vector<std::string> ssh = {"ssh"};  ///< the command and options of the user's own
  std::string remote_cohort;               ///< path of the command there; empty: as here
  /// By srun, which has to be told in which component of a heterogeneous job a host is. Of those that are in one.
  std::map<std::string, int> components = {};
  // By hand.
  std::string secret_file;  ///< the job's secret, which the agents have, too
  std::uint16_t port = 0;   ///< where they come to; 0: one of the system's choice
  /// Of launchers that are several: what they have in common.
  std::optional<net::Secret> secret = {};
  std::string join;      ///< what has to be typed on each other node; empty: nothing, Slurm starts them
  std::string nodes_id;  ///< what each has to say, too
};

/// The words that run `cohort agent --invited` on the host: argv, argv[0] is looked up in PATH. Pure.
std::vector<std::string> remote_command(const RemoteOptions& options, const std::string& host,
                                        const std::string& cohort_path);

/// On another host. The agent announces itself on `out` and waits for its invitation (invitation.h).
Result<AgentProcess> start_remote_agent(const RemoteOptions& options, const PlannedHost& host);

/// "ssh", "srun", "mpirun": for messages.
std::string_view start_method_name(StartMethod method);

/// As a shell takes it: 'two words'.
std::string shell_quoted(std::string_view word);

}  // namespace cohort::launch
