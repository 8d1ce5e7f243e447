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
  enum class Course { GoesOn, Fails, Ends };  ///< Ends: it has been said how

  /// `job` outlives this.
  explicit Succession(Standing& job) : job_(job) {}

  /// Those that have ended, or are lost, or leave.
  Course leave(const std::vector<int>& workers, const std::string& cause);
  Course announce(const std::string& cause);
  /// Some were lost with their host, or have failed, `by_itself` or because of something else.
  void note_failures(const std::vector<int>& workers, bool by_itself);
  void end_job(int status, std::string why, int signal);
  void end_as_told(int agent, int signal);

  /// Somebody's part is done.
  void finish(KnownWorker& worker);
  void look_for_members();
  void look_for_waiting();
  /// Whether those that go on have formed a world.
  bool look_for_formed();
  void settle_doubt();
  /// All that a host has, at once.
  void take_newcomers();
  /// It was not heard in time whether those that are left have the state.
  void look_for_doubt();
  void look_for_hosts();
  /// The last of the actions.
  void give_verdict();

 private:
  Course go_on(std::string cause);
  Course lose_training(const std::string& cause);
  Course end(const std::string& cause, const std::string& why);

  Standing& job_;
  bool workers_ended_ = false;    ///< they were asked to
  std::set<int> fresh_failures_;  ///< the others have formed no world since: they may be why those fail
  bool own_errors_ = true;        ///< these have failed by themselves
  std::string doubt_cause_;
  std::optional<Standing::Time> announced_at_;  ///< the latest epoch, whose members have formed no world yet
  std::optional<Action> verdict_;
};

}  // namespace cohort::launch
