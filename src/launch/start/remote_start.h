// The way of one agent into the agent pool over a command (ssh, srun, mpirun): listens to what the command says until
// the agent announces itself, answers with the invitation, and keeps what was said in case nobody comes. Belongs to the
// agents's thread; the AgentProcess has to outlive it.
#pragma once

#include "launch/loop.h"
#include "launch/start/invitation.h"
#include "launch/start/starter.h"
#include "sys/process.h"

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::launch {

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

/// What is known of a command that ended, or was given up, before its agent came.
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
/// What it comes to. `kind` is a row of `cohort doctor`: "ssh-login", "ssh-host-key", ..., "shell-exits", "silent",
/// "command", "control".
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
std::string one_line(std::string_view text);

}  // namespace cohort::launch
