// The processes that an epoch has started, and who of them has ended. Plain data. One thread.
#pragma once

#include "launch/plan/plan.h"
#include "launch/processes.h"

#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace cohort::launch {

/// Who takes part in an epoch, by their numbers in its Roles, and who of them has ended.
class Members {
 public:
  explicit Members(const Plan& plan)
      : roles_(plan.roles()),
        hosts_(hosts_of_processes(plan)),
        ended_(hosts_.size(), false),
        running_{roles_.workers, roles_.servers, roles_.evaluator ? 1 : 0} {}

  const Roles& roles() const noexcept { return roles_; }
  const std::vector<std::string>& hosts() const noexcept { return hosts_; }
  /// The plan has more ranks, and no other processes.
  void grow(const Plan& plan);
  void end(int process);
  bool has_ended(int process) const { return ended_[static_cast<std::size_t>(process)]; }
  int running(Role role) const { return running_[static_cast<std::size_t>(role)]; }
  int running_ranks() const { return running(Role::Worker); }
  /// The first of the roles of which any process runs.
  Role running_role() const;
  /// "servers 0-1": who runs that is no rank.
  std::string running_others() const;

 private:
  Roles roles_;
  std::vector<std::string> hosts_;
  std::vector<bool> ended_;
  std::array<int, 3> running_;  ///< by role
};

}  // namespace cohort::launch
