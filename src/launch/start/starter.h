// Places one agent on a host. A starter is the only part that knows how a host is reached; what it returns looks the
// same for every kind: a process on this host that ends when the agent has ended, and a lifeline that tells the agent,
// by its end, that the supervisor is gone. Starters keep no state; the agent pool's thread calls them. And SideCommand:
// any other program that runs beside this one.
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

/// A program that runs beside this one, in a group of its own at least. Ends with it at the latest.
class SideCommand {
 public:
  struct Options {
    sys::SpawnOptions spawn;  ///< what its output is not taken of goes where these descriptors say
    enum class Output { None, Errors, Results, All } output = Output::None;  ///< Results: stdout
    std::function<void(std::string_view)> on_output = {};                    ///< gets that, as it comes
    /// Once it has ended, and what it printed has been handed on; may destroy this.
    std::function<void(const sys::ExitStatus&)> on_ended;
  };
  /// Throws Unavailable.
  SideCommand(Loop& loop, Options options);
  /// Hands on what it has printed by then, and kills it, and what it has started in its group.
  ~SideCommand();
  SideCommand(const SideCommand&) = delete;
  SideCommand& operator=(const SideCommand&) = delete;

  /// Another `cohort`, with these arguments, in a session of its own: a Ctrl-C is for the job.
  static Options cohort(std::vector<std::string> arguments, int parent_death_signal);
  pid_t pid() const noexcept { return process_.pid; }
  /// Waits, until `deadline`. False if it still runs; else `end` is called next.
  bool wait(net::Deadline deadline);
  void end();

 private:
  void read();

  Options options_;
  sys::ChildProcess process_;
  sys::UniqueFd output_;
  Watch output_watch_, process_watch_;
};

struct Captured {
  int status = 0;    ///< as a shell gives it
  std::string text;  ///< stdout and stderr, at most 1 MiB
};

/// Asks a program for its version: runs it, takes what it prints, and gives up on it after a while. Nothing that it has
/// started in its own process group outlives the call. Not for a process that reaps children by itself.
/// `command` is a name that is searched in PATH, or a path, and its arguments. Fails with Unavailable if it is not
/// there or cannot be started, with Timeout if it has not ended within `limit`, with Aborted if the descriptor
/// `interrupt` is readable before.
Result<Captured> capture(const std::vector<std::string>& command, std::chrono::milliseconds limit, int interrupt = -1);

/// The command, whatever its file is called: this program, or `cohort` beside it after `set_beside_command`.
Result<std::string> own_command();
/// This program is one beside the command (cohort-doctor): its `main` says so, once, before anything else runs.
void set_beside_command() noexcept;

struct AgentProcess {
  sys::ChildProcess process;
  sys::UniqueFd lifeline;  ///< write end; over a command an invitation is written, and nothing after it
  // Output of the command in between; empty where there is none.
  sys::UniqueFd out;
  sys::UniqueFd err;
};

/// On this host: `cohort agent` in a session of its own, the secret in an inherited sealed memory file. `input_fd`: to
/// be rank 0's stdin; -1: none.
Result<AgentProcess> start_local_agent(const PlannedHost& host, const net::Endpoint& supervisor,
                                       const net::Secret& secret, int input_fd);

/// Path of `cohort` on other hosts.
std::string remote_cohort(const JobSpec& spec);

/// The ssh command with options that keep it from asking anything; a host and a command come behind it.
std::vector<std::string> ssh_command(const JobSpec& spec);

/// The words that run `cohort agent --invited` on the host: argv, argv[0] is looked up in PATH.
std::vector<std::string> remote_command(const JobSpec& spec, StartMethod method, const PlannedHost& host);

/// On another host. The agent announces itself on `out` and waits for its invitation (invitation.h).
Result<AgentProcess> start_remote_agent(const JobSpec& spec, StartMethod method, const PlannedHost& host);

/// "ssh", "srun", "mpirun": for messages.
std::string_view start_method_name(StartMethod method);

/// As a shell takes it: 'two words'.
std::string shell_quoted(std::string_view word);

/// The way of one agent into the agent pool over a command (ssh, srun, mpirun): listens to what the command says until
/// the agent announces itself, answers with the invitation, and keeps what was said in case nobody comes. Belongs to
/// the agents' thread; the AgentProcess has to outlive it.
class RemoteStart {
 public:
  struct Events {
    std::function<void(std::string)> on_unfit;      ///< the agent there cannot be of this job
    std::function<void(std::string)> on_complaint;  ///< a line of its stderr, once it has joined
  };
  RemoteStart(Loop& loop, AgentProcess& process, Invitation invitation, Events events);
  RemoteStart(const RemoteStart&) = delete;
  RemoteStart& operator=(const RemoteStart&) = delete;

  /// Takes what the command has said last; call it once its process has ended.
  void drain();
  /// From now on stderr is passed on.
  void set_joined() noexcept { joined_ = true; }
  bool announced() const noexcept { return announced_; }
  const std::string& noise() const noexcept { return noise_; }
  const std::string& complaints() const noexcept { return complaints_; }

 private:
  bool read_out();
  bool read_err();
  void take_line(std::string_view line);

  AgentProcess& process_;
  const Invitation invitation_;
  Events events_;
  Watch out_, err_;
  bool announced_ = false;
  bool joined_ = false;
  std::string line_;
  std::string error_line_;
  std::string noise_;       ///< of stdout, before the announcement; bounded
  std::string complaints_;  ///< of stderr, before it has joined; bounded
};

/// Everything known of a command that ended, or was given up, before its agent came.
struct FailedStart {
  StartMethod method = StartMethod::Ssh;
  std::string host;
  std::string command;      ///< of the agent: its path there
  std::string ssh = "ssh";  ///< the ssh command, for advice: with the user's options
  bool announced = false;
  std::optional<sys::ExitStatus> status;  ///< nullopt: it still runs
  std::string noise;
  std::string complaints;
};
/// Conclusion from a FailedStart. `kind` is a row of `cohort doctor`: "ssh-login", "ssh-host-key", ..., "shell-exits",
/// "silent", "command", "control".
struct Diagnosis {
  std::string_view kind;
  std::string why;
  std::string advice;
  std::string said;  ///< by the command on stderr, and by shells on stdout, in a line
};
/// Pure, as is all below.
Diagnosis diagnose(const FailedStart& failed);
/// Another start may well succeed: it was hindered by another one at the same moment.
bool is_transient(const FailedStart& failed);
/// Why, and what to try.
std::string explain(const FailedStart& failed);
/// Without line ends and control characters, at most 600 bytes: the last ones.
std::string last_of(std::string_view text);

}  // namespace cohort::launch
