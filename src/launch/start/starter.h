// Places one agent on a host. Only a starter knows how a host is reached; its result has the same form for every
// method: a process on this host that ends when the agent has ended, and a lifeline whose end tells the agent that the
// supervisor is gone. Starters keep no state; the agent pool's thread calls them. SideCommand is any other program that
// runs beside this one.
#pragma once

#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/loop.h"
#include "launch/plan/plan.h"
#include "launch/start/invitation.h"
#include "net/address.h"
#include "net/secret.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// A program that runs beside this one, at least in a process group of its own, and ends with it at the latest; with
/// `shell`, also all processes that it has started in that group.
class SideCommand {
 public:
  struct Options {
    sys::SpawnOptions spawn;  ///< output that is not taken goes to these descriptors
    std::string shell = {};   ///< a command for /bin/sh, in place of path and arguments in `spawn`
    enum class Output { None, Errors, Results, All } output = Output::None;  ///< Results: stdout
    std::function<void(std::string_view)> on_output = {};                    ///< gets the taken output as it comes
    /// Called when the command has ended and its output has been passed on; may destroy this.
    std::function<void(const sys::ExitStatus&)> on_ended;
  };
  /// Throws Unavailable.
  SideCommand(Loop& loop, Options options);
  /// Passes on the output so far, and kills the process with its process group.
  ~SideCommand();
  SideCommand(const SideCommand&) = delete;
  SideCommand& operator=(const SideCommand&) = delete;

  /// Options for another `cohort` with these arguments, in a session of its own, so that Ctrl-C reaches only the job.
  static Options cohort(std::vector<std::string> arguments, int parent_death_signal);
  pid_t pid() const noexcept { return process_.pid; }
  /// Waits until `deadline`. Returns false if the command still runs; otherwise call `end` next.
  bool wait(net::Deadline deadline);
  void end();

 private:
  void read();

  Options options_;
  sys::ChildProcess process_;
  sys::UniqueFd output_;
  sys::UniqueFd lifeline_;
  Watch output_watch_, process_watch_;
};

struct Captured {
  int status = 0;    ///< exit status as a shell gives it
  std::string text;  ///< stdout and stderr, at most 1 MiB
};

/// Runs a program, such as one that prints its version, and takes its output. No process that it has started in its
/// own process group outlives the call. Not for a process that reaps children by itself. `command` is a name that is
/// searched in PATH, or a path, and its arguments. Fails with Unavailable if it is missing or cannot be started,
/// with Timeout if it has not ended within `limit`, with Aborted if the descriptor `interrupt` becomes readable
/// before.
Result<Captured> capture(const std::vector<std::string>& command, std::chrono::milliseconds limit, int interrupt = -1);

/// Returns the path of `cohort`: this program, or the one beside it after `set_beside_command`.
Result<std::string> own_command();
/// Says that this program lies beside `cohort` (cohort-doctor); to be called first in `main`, once.
void set_beside_command() noexcept;

struct AgentProcess {
  sys::ChildProcess process;
  sys::UniqueFd lifeline;  ///< write end; an invitation is written to a command, and nothing after it
  // Output of the command in between; empty if there is no such command.
  sys::UniqueFd out;
  sys::UniqueFd err;
};

/// Starts an agent on this host: `cohort agent` in a session of its own. It inherits the secret in a sealed memory
/// file. `input_fd`: rank 0's stdin; -1: none. `held_fd` stays open in the agent and its guard; -1: none.
Result<AgentProcess> start_local_agent(const PlannedHost& host, const net::Endpoint& supervisor,
                                       const net::Secret& secret, int input_fd, int held_fd);

/// Returns the path of `cohort` on other hosts.
std::string remote_cohort(const JobSpec& spec);

/// Returns the ssh command with options that keep it from asking anything; a host and a command are to be appended.
std::vector<std::string> ssh_command(const JobSpec& spec);

/// Returns the argv that runs `cohort agent --invited` on the host; argv[0] is looked up in PATH.
std::vector<std::string> remote_command(const JobSpec& spec, StartMethod method, const PlannedHost& host);

/// Starts an agent on another host. It announces itself on `out` and waits for its invitation (invitation.h).
Result<AgentProcess> start_remote_agent(const JobSpec& spec, StartMethod method, const PlannedHost& host);

/// Returns "ssh", "srun", "mpirun", for messages.
std::string_view start_method_name(StartMethod method);

/// Quotes a word for a shell: 'two words'.
std::string shell_quoted(std::string_view word);

/// Brings one agent into the agent pool over a command (ssh, srun, mpirun): reads the command's output until the agent
/// announces itself, passes on the invitation, and keeps the other output in case no agent comes. Belongs to the
/// agents' thread; the AgentProcess has to outlive it.
class RemoteStart {
 public:
  struct Events {
    std::function<void()> on_announced;             ///< the agent waits for `invite`
    std::function<void(std::string)> on_unfit;      ///< the agent there cannot take part in this job
    std::function<void(std::string)> on_complaint;  ///< a line of its stderr, after it has joined
  };
  RemoteStart(Loop& loop, AgentProcess& process, Events events);
  RemoteStart(const RemoteStart&) = delete;
  RemoteStart& operator=(const RemoteStart&) = delete;

  void invite(const Invitation& invitation);
  /// Reads the command's last output. To be called after its process has ended.
  void drain();
  /// Passes stderr on from now on.
  void set_joined() noexcept { joined_ = true; }
  bool announced() const noexcept { return announced_; }
  const std::string& noise() const noexcept { return noise_; }
  const std::string& complaints() const noexcept { return complaints_; }

 private:
  bool read_out();
  bool read_err();
  void take_line(std::string_view line);

  AgentProcess& process_;
  Events events_;
  Watch out_, err_;
  bool announced_ = false;
  bool joined_ = false;
  std::string line_;
  std::string error_line_;
  std::string noise_;       ///< stdout before the announcement; bounded
  std::string complaints_;  ///< stderr before the agent has joined; bounded
};

/// The known facts about a command that ended, or was given up, before its agent came.
struct FailedStart {
  StartMethod method = StartMethod::Ssh;
  std::string host;
  std::string command;      ///< path of the agent's command there
  std::string ssh = "ssh";  ///< ssh command with the user's options, for advice
  bool announced = false;
  std::optional<sys::ExitStatus> status;  ///< nullopt: the command still runs
  std::string noise;
  std::string complaints;
};
/// Conclusion from a FailedStart. `kind` is a row of `cohort doctor`: "ssh-login", "ssh-host-key", ..., "shell-exits",
/// "silent", "command", "control".
struct Diagnosis {
  std::string_view kind;
  std::string why;
  std::string advice;
  std::string said;  ///< the command's stderr and the shell's stdout, in one line
};
/// Pure, like all functions below.
Diagnosis diagnose(const FailedStart& failed);
/// Returns true if another start may well succeed, since another simultaneous start disturbed this one.
bool is_transient(const FailedStart& failed);
/// Says why the start failed, and what to try.
std::string explain(const FailedStart& failed);
/// Returns the last 600 bytes at most, without line ends and control characters.
std::string last_of(std::string_view text);

}  // namespace cohort::launch
