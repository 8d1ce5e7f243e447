#include "launch/supervise/members.h"

namespace cohort::launch {

void Members::end(int process) {
  if (has_ended(process)) return;
  ended_[static_cast<std::size_t>(process)] = true;
  --running_[static_cast<std::size_t>(roles_.role_of(process))];
}

void Members::grow(const Plan& plan) {
  running_[0] += plan.world_size - roles_.workers;
  roles_ = plan.roles();
  hosts_ = hosts_of_processes(plan);
  ended_.resize(hosts_.size(), false);
}

Role Members::running_role() const {
  for (const Role role : {Role::Worker, Role::Server}) {
    if (running(role) > 0) return role;
  }
  return Role::Evaluator;
}

std::string Members::running_others() const {
  std::vector<int> processes;
  for (int process = roles_.workers; process < roles_.all(); ++process) {
    if (!has_ended(process)) processes.push_back(process);
  }
  return roles_.names_of(processes);
}

}  // namespace cohort::launch
