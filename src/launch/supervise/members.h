// The processes of an epoch: which processes take part, what they report and print, and how they have ended; and what
// is known of the epoch's end. Decides nothing. One thread.
#pragma once

#include "launch/health/health.h"
#include "launch/health/verdict.h"
#include "launch/output/other_hosts.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/supervisor.h"

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Keeps the processes of an epoch by their numbers in its Roles.
class Members {
 public:
  /// Takes the processes of `setup.plan`. All arguments outlive this.
  Members(const JobSetup& setup, RunOutput& run);

  /// Begins to watch the processes of the settled plan. `shown`: the ranks whose output is shown; empty: all.
  void settle(const std::vector<int>& shown);
  /// Called when the plan has more ranks; the job has no other processes.
  void grow();

  const Roles& roles() const noexcept { return roles_; }
  bool has_ended(int process) const { return ended_[static_cast<std::size_t>(process)]; }
  int running(Role role) const { return running_[static_cast<std::size_t>(role)]; }
  int running_ranks() const { return running(Role::Worker); }
  /// Returns the first role that has running processes.
  Role running_role() const;
  /// Names the running processes that are no ranks: "servers 0-1".
  std::string running_others() const;
  /// To be called after `settle`.
  HealthWatch& health() { return *health_; }
  bool somebody_saves() const { return health_ && health_->somebody_saves(); }

  /// Takes output of the agent's processes.
  void take(const AgentHandle& agent, const Output& output);
  void started(const AgentHandle& agent, const std::vector<int>& processes);

  Ending ending_of(int process, const ProcessEnd& end) const;
  /// Returns the ending of a process from which nothing more will come.
  Ending killed(int process) const;
  /// `well`: the process has not failed.
  void end(int process, Ending ending, bool well);
  const std::vector<Ending>& endings() const noexcept { return endings_; }
  Ending* find(int rank);
  /// Texts by process: what it was doing at the first failure since `forget_failure`.
  const std::vector<std::string>& doing_then() const noexcept { return doing_then_; }
  void note_failure(const Ending& ending);
  void forget_failure() { doing_then_.clear(); }

 private:
  void take_plan();
  void tell_troubles();

  const JobSetup& setup_;
  RunOutput& run_;
  Roles roles_;
  std::vector<std::string> hosts_;
  std::vector<bool> ended_;
  std::array<int, 3> running_{};  ///< by role
  std::optional<HealthWatch> health_;
  std::optional<RemoteLogs> remote_logs_;
  std::vector<Ending> endings_;
  std::vector<std::string> doing_then_;
};

/// The end of an epoch, as far as it is known. The first reason for it counts.
struct EpochEnd {
  JobEnd known;             ///< `with` adds the rest
  std::string lost_agent;   ///< the lost agent, if that is why the job ends
  std::string undelivered;  ///< why the owner lacks payloads that its ranks have sent
  bool agent_lost = false;
  bool told_to_end = false;
  int told_by = 0;  ///< the signal that decides the exit status

  /// Sets the exit status, and returns true, unless there is one.
  bool set_status(int status) {
    if (known.stop_status) return false;
    known.stop_status = status;
    return true;
  }
  /// Sets the lost agent as the reason, unless a rank had already failed for another reason than a lost peer.
  void lose_agent(const Members& members, const std::string& what);
  /// Sets the lost payloads as the reason. Returns false if there is an earlier one.
  bool lose_payloads(const Members& members, const std::string& why);
  JobEnd with(const Members& members, const std::string& stop_reason) const;
};

}  // namespace cohort::launch
