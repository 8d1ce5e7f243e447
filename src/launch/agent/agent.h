// The agent of one host: a process of its own that starts the host's workers and owns them, and everything that they
// start, until the last one is gone. It knows its supervisor only through one authenticated connection, so the
// supervisor may be on another host. Around it stands a guard, a second process that outlives it: if the agent is
// killed, the guard ends what the agent leaves; if the guard is killed, the agent ends the job.
#pragma once

#include "base/result.h"
#include "launch/messages.h"
#include "net/address.h"
#include "net/secret.h"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

struct AgentOptions {
  std::vector<net::Endpoint> supervisor;  ///< one of these is it
  std::optional<net::Secret> secret = {};
  int host_index = 0;     ///< -1: whatever the supervisor calls the host of this name; of a launcher, gives it
  std::string host_name;  ///< empty: the system's
  /// The supervisor is on another host; one that is silent for `host_timeout` is lost, and with it the job here.
  bool elsewhere = false;
  std::chrono::milliseconds host_timeout = std::chrono::seconds(3);
  /// End of file here means that the supervisor (or what carries its voice, e.g. ssh) is gone. -1: the connection alone
  /// says it.
  int lifeline_fd = 0;
  bool patient = false;  ///< the supervisor may come later
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(30);
  /// For a launcher that is one of several (plan.h): their number, and what this one starts here instead of what the
  /// supervisor names: program, arguments, environment, folder and limits are this command's own.
  int nodes = 0;
  std::optional<StartJob> own = {};
  std::string nodes_id = {};  ///< what all of them have to say
  std::string unable = {};    ///< why nothing can be started here: it is only told
  std::string place = {};     ///< where the supervisor is, for people
  bool quiet = false;         ///< says only what has gone wrong
  /// For an agent that comes by itself: the number of ranks it takes. Unless it is a launcher, they run in this
  /// process's folder and environment; the supervisor's variables override the environment's.
  int ranks = 0;
  std::vector<std::string> devices = {};  ///< GPUs that it brings along
  int input_fd = -1;                      ///< rank 0's stdin, where that is here; -1: none
};

/// Becomes guard and agent. Returns the process's exit status once nothing of the job is left on this host: 0 if
/// all went its way, whatever the workers' own statuses; 1 if the supervisor was lost or a process could not be ended.
/// The launcher of a node (`own`) returns the job's exit status.
/// Has to be called before the process has a second thread.
int run_agent(const AgentOptions& options);

/// Looks whether a job that comes from another host finds here what it needs, before anything of it is started. Touches
/// nothing but the run's folder.
/// True if the run's folder was not here and has been made. Fails with Unavailable: the working folder or the program
/// is missing; Io: the run's folder cannot be made.
Result<bool> check_host(const StartJob& job);

}  // namespace cohort::launch
