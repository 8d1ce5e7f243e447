// Succession decides which workers form the next epoch when some leave or have come, and how the job ends if none can.
// A part of Membership. Pure. One thread.
#pragma once

#include "launch/membership/standing.h"

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {

class Succession {
 public:
  enum class Course { GoesOn, Fails };  ///< GoesOn also once an action has ended the job

  /// `job` outlives this.
  explicit Succession(Standing& job) : job_(job) {}

  /// Goes on without workers that have ended, are lost, or leave.
  Course leave(const std::vector<int>& workers, const std::string& cause);
  Course announce(const std::string& cause);
  /// Notes workers that were lost with their host, or that have failed, `by_itself` or as a consequence.
  void note_failures(const std::vector<int>& workers, bool by_itself);
  void end_job(int status, std::string why, int signal);
  void end_as_told(int agent, int signal);

  /// Called when some worker has finished.
  void finish(KnownWorker& worker);
  /// Called when a worker with the state has saved and ended, as asked.
  void note_saved();
  void look_for_members();
  void look_for_waiting();
  /// Looks whether the remaining workers have formed a world.
  bool look_for_formed();
  void settle_doubt();
  /// Takes the newcomers of a host in together.
  void take_newcomers();
  /// Called when the time to hear whether the remaining workers have the state is over.
  void look_for_doubt();
  void look_for_hosts();
  /// Adds the verdict as the last action.
  void give_verdict();

 private:
  Course go_on(std::string cause);
  Course lose_training(const std::string& cause);
  Course end(const std::string& cause, const std::string& why);

  Standing& job_;
  bool saved_ = false;            ///< a worker with the state has saved and ended, as asked
  bool workers_ended_ = false;    ///< the workers were asked to end
  std::set<int> fresh_failures_;  ///< failures since the last world: they may be why other workers fail
  bool own_errors_ = true;        ///< the workers in `fresh_failures_` have failed by themselves
  std::string doubt_cause_;
  std::optional<Standing::Time> announced_at_;  ///< when the latest epoch was announced, while its world is not formed
  std::optional<Action> verdict_;
};

}  // namespace cohort::launch
