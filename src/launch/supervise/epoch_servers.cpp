// Of an epoch: servers that fail while it goes on, and are started again, or gone on without.
#include "launch/supervise/epoch.h"

#include <algorithm>
#include <csignal>
#include <utility>
#include <vector>

namespace cohort::launch {

AgentHandle& Epoch::agent_of(int process) const {
  const auto& all = agents_.members();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& member) {
    const std::vector<int> here = processes_of(job_.setup_.plan, member->host);
    return std::find(here.begin(), here.end(), process) != here.end();
  });
  return **found;
}

Epoch::Fate Epoch::settle_fate(Ending& ending, int process) {
  const auto before = again_.find(process);
  if (before != again_.end()) {
    ending.restarts = before->second.restarts + 1;
    ending.first_cause =
        before->second.restarts == 0 ? sys::to_string(before->second.status) : before->second.first_cause;
  }
  const bool may = ending.role == Role::Server && !ending.asked && !ending.status.success() && ending.before_stop &&
                   (stage_ == Stage::Starting || stage_ == Stage::Running);
  if (!may) return Fate::Failed;
  const std::string lost =
      fmt::format("{} on {} is lost ({})", ending.name(), ending.host, sys::to_string(ending.status));
  if (job_.server_restarts_ < options_.server_restarts) {
    say(fmt::format("{}; it is started again ({} of {} times, --server-restarts)", lost, ++job_.server_restarts_,
                    options_.server_restarts));
    agent_of(process).channel->send(
        StartAgain{process, {fmt::format("{}={}", env::kServerRestart, ending.restarts + 1)}});
    awaited_.insert(process);
    RankReport last = ending.last;
    last.rank = process;
    health_->rank_ended(last);
    job_.live_->starts_again(process);
    job_.record_.server_failures.push_back(ending);
    job_.write_record();
    again_.insert_or_assign(process, std::move(ending));
    return Fate::Again;
  }
  if (lost_servers_ < options_.lost_servers && running(Role::Server) > 1) {
    ending.spared = true;
    say(fmt::format("{}; the job goes on without it ({} of {} that may be, --lost-servers)", lost, ++lost_servers_,
                    options_.lost_servers));
    if (options_.server_restarts > 0) agent_of(process).channel->send(GoOnWithout{process});
    return Fate::Without;
  }
  return Fate::Failed;
}

// Servers are not started again elsewhere: their place is taken by those of other hosts that have copies.
bool Epoch::goes_on_without(AgentHandle& agent, const std::string& why) {
  if (stage_ != Stage::Running || agent.host.ranks > 0 || agent.all_gone) return false;
  const Roles roles = job_.setup_.plan.roles();
  std::vector<int> lost;
  for (const int process : processes_of(job_.setup_.plan, agent.host)) {
    if (roles.role_of(process) != Role::Server) return false;
    const bool ended = std::any_of(endings_.begin(), endings_.end(), [&](const Ending& ending) {
      return roles.process_of(ending.role, ending.rank) == process;
    });
    if (!ended) lost.push_back(process);
  }
  const int count = static_cast<int>(lost.size());
  if (lost_servers_ + count > options_.lost_servers || running(Role::Server) <= count) return false;
  lost_servers_ += count;
  agent.all_gone = true;
  AgentPool::kill(agent);  // its guard, if it lives, ends what is left
  if (count == 0) {
    say(fmt::format("{} is lost ({}), where nothing ran any more", agent.host.name, why));
  } else {
    say(fmt::format(
        "{} on {} {} lost with {} host ({}); the job goes on without ({} of {} that may be, --lost-servers)",
        roles.names_of(lost), agent.host.name, count == 1 ? "is" : "are", count == 1 ? "its" : "their", why,
        lost_servers_, options_.lost_servers));
  }
  for (const int process : lost) {
    awaited_.erase(process);
    Ending ending;
    ending.role = Role::Server;
    ending.rank = roles.number_of(process);
    ending.host = agent.host.name;
    ending.pid = job_.record_.pids[static_cast<std::size_t>(process)];
    ending.status.signal = SIGKILL;
    ending.spared = true;
    ++ended_[static_cast<std::size_t>(Role::Server)];
    job_.tell_how_server_ended(ending.rank, "lost with its host");
    RankReport last = {};
    last.rank = process;
    health_->rank_ended(last);
    job_.live_->process_ended(process, ending.spared, ending.status);
    endings_.push_back(std::move(ending));
  }
  health_->host_ended(processes_of(job_.setup_.plan, agent.host));
  ask_next_role();
  return true;
}

void Epoch::on_started_again(const StartedAgain& started) {
  if (awaited_.erase(started.rank) == 0) return;
  const int process = started.rank;
  Ending& before = again_.at(process);
  if (started.pid != 0) {
    job_.record_.pids[static_cast<std::size_t>(process)] = started.pid;
    health_->started_again(process);
    job_.announcer_.started_again(before, started.pid);
    job_.write_record();
    return;
  }
  // It stays what it was: a failure, or, where all are told to end, nothing that anybody needs.
  before.spared = started.why.empty();
  if (!before.spared) say(fmt::format("{} on {} cannot be started again: {}", before.name(), before.host, started.why));
  ++ended_[static_cast<std::size_t>(Role::Server)];
  job_.live_->process_ended(process, before.spared, before.status);
  endings_.push_back(before);
  look_for_failure();
  ask_next_role();
}

}  // namespace cohort::launch
