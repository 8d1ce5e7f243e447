#include "launch/supervise/members.h"

#include <algorithm>
#include <csignal>
#include <utility>

namespace cohort::launch {

Members::Members(const JobSetup& setup, RunOutput& run) : setup_(setup), run_(run), roles_(setup.plan.roles()) {
  take_plan();
}

void Members::take_plan() {
  roles_ = setup_.plan.roles();
  hosts_ = hosts_of_processes(setup_.plan);
  ended_.assign(hosts_.size(), false);
  running_ = {roles_.workers, roles_.servers, roles_.evaluator ? 1 : 0};
}

void Members::settle(const std::vector<int>& shown) {
  const Plan& plan = setup_.plan;
  take_plan();
  health_.emplace(hosts_, roles_, setup_.spec);
  run_.set_plan(plan, shown);
  if (setup_.spec.keep_logs && goes_elsewhere(plan)) remote_logs_.emplace(run_.state().log_folder, roles_);
}

void Members::grow() {
  const Plan& plan = setup_.plan;
  running_[0] += plan.world_size - roles_.workers;
  roles_ = plan.roles();
  hosts_ = hosts_of_processes(plan);
  ended_.resize(hosts_.size(), false);
  if (remote_logs_) remote_logs_->grow(roles_);
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

void Members::take(const AgentHandle& agent, const Output& output) {
  if (remote_logs_ && !agent.host.local) {
    remote_logs_->keep(output);
    tell_troubles();
  }
  run_.take(static_cast<std::size_t>(agent.host.index), output);
}

void Members::started(const AgentHandle& agent, const std::vector<int>& processes) {
  if (!remote_logs_ || agent.host.local) return;
  remote_logs_->open(processes);
  tell_troubles();
}

void Members::tell_troubles() {
  for (const std::string& text : remote_logs_->take_troubles()) run_.say(text);
}

Ending Members::ending_of(int process, const ProcessEnd& end) const {
  const auto index = static_cast<std::size_t>(process);
  return {end, roles_.role_of(process), roles_.number_of(process), hosts_[index], run_.state().pids[index]};
}

Ending Members::killed(int process) const {
  Ending ending = ending_of(process, {});
  ending.status.signal = SIGKILL;
  return ending;
}

void Members::end(int process, Ending ending, bool well) {
  for (const Warning& warning : health_->rank_ended(process, ending.last)) run_.warn(warning);
  run_.process_ended(process, well, ending.status);
  if (!has_ended(process)) {
    ended_[static_cast<std::size_t>(process)] = true;
    --running_[static_cast<std::size_t>(roles_.role_of(process))];
  }
  if (remote_logs_) remote_logs_->close(process);
  endings_.push_back(std::move(ending));
}

Ending* Members::find(int rank) {
  const auto found = std::ranges::find(endings_, rank, &Ending::rank);
  return found != endings_.end() ? &*found : nullptr;
}

void Members::note_failure(const Ending& ending) {
  if (!doing_then_.empty()) return;
  doing_then_ = health_->doing_now();
  const int process = roles_.process_of(ending.role, ending.rank);
  if (roles_.is_rank(process))
    doing_then_[static_cast<std::size_t>(process)] = doing(ending.last) + at_step(ending.last);
}

void EpochEnd::lose_agent(const Members& members, const std::string& what) {
  agent_lost = true;
  const auto first = first_failure(members.endings());
  if ((!first || follows_another(*first)) && set_status(1)) lost_agent = what;
}

bool EpochEnd::lose_payloads(const Members& members, const std::string& why) {
  if (first_failure(members.endings()) || !set_status(1)) return false;
  undelivered = why;
  return true;
}

JobEnd EpochEnd::with(const Members& members, const std::string& stop_reason) const {
  JobEnd end = known;
  end.roles = members.roles();
  end.endings = members.endings();
  end.doing_then = members.doing_then();
  end.stop_reason = !undelivered.empty() ? undelivered : lost_agent.empty() ? stop_reason : lost_agent;
  end.told_to_end = told_by != 0;
  return end;
}

}  // namespace cohort::launch
