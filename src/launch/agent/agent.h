// The agent of one host: a process of its own that starts the host's workers and owns them, and everything that they
// start, until the last process is gone. It reaches its supervisor only through one authenticated connection, so the
// supervisor may be on another host. A guard, a second process, outlives the agent: if the agent is killed, the guard
// ends the processes that are left; if the guard is killed, the agent ends the job.
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
  std::vector<net::Endpoint> supervisor;   ///< addresses of the supervisor, to be tried in turn
  std::vector<net::Endpoint> router = {};  ///< addresses of the agent through which this one reaches the supervisor
  bool routes = false;                     ///< this agent is a router for others
  std::optional<net::Secret> secret = {};
  int host_index = 0;     ///< -1: the host named `host_name`; a launcher gives its index
  std::string host_name;  ///< empty: the system's host name
  /// The supervisor is on another host; if that host is silent for `host_timeout`, supervisor and job are lost.
  bool elsewhere = false;
  std::chrono::milliseconds host_timeout = std::chrono::seconds(3);
  /// End of file here means that the supervisor, or the command that connects to it (ssh), is gone. -1: only the
  /// connection says so.
  int lifeline_fd = 0;
  bool patient = false;  ///< the supervisor may start later
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(30);
  /// For one of several launchers (plan.h): their number, and the order that it carries out in place of the
  /// supervisor's. The order's program, arguments, environment, folder and limits come from this command.
  int nodes = 0;
  std::optional<StartJob> own = {};
  std::string nodes_id = {};  ///< identical for all launchers
  std::string unable = {};    ///< why nothing can be started here; only reported to the supervisor
  std::string place = {};     ///< address of the supervisor, for people
  bool quiet = false;         ///< print only failures
  /// For an agent that comes by itself: the number of ranks it takes. If it is no launcher, its ranks run in this
  /// process's folder and environment; the supervisor's variables override the environment's.
  int ranks = 0;
  std::vector<std::string> devices = {};  ///< GPUs of the agent, for the job
  int input_fd = -1;                      ///< rank 0's stdin, if rank 0 is here; -1: none
};

/// Becomes guard and agent. Returns the process's exit status once nothing of the job is left on this host: 0 if the
/// agent did its task, however the workers ended; 1 if the supervisor was lost or a process could not be ended. The
/// launcher of a node (`own`) returns the job's exit status. To be called before the process has a second thread.
int run_agent(const AgentOptions& options);

/// Checks that a job from another host finds here what it needs, before any of it is started. Changes nothing but the
/// run's folder. Returns true if the run's folder was missing and has been made. Fails with Unavailable if the working
/// folder or the program is missing, with Io if the run's folder cannot be made.
Result<bool> check_host(const StartJob& job);

}  // namespace cohort::launch
