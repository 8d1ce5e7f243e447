#include "launch/membership/standing.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::launch {

std::string plural(std::size_t count) { return count == 1 ? "" : "s"; }

std::string names_of_workers(const std::vector<int>& workers) {
  return fmt::format("worker{} {}", plural(workers.size()), to_ranges(workers));
}

Standing::Standing(MembershipOptions wanted, const Plan& plan, std::set<std::string> barred, std::uint64_t first)
    : options(std::move(wanted)), first_epoch(first), hosts(options.cooldown, std::move(barred)), roster(first) {
  for (const PlannedHost& host : plan.hosts) {
    agents[host.index].name = host.name;
    next_agent = std::max(next_agent, host.index + 1);
    PlannedHost listed = host;
    listed.slots = host.ranks;
    hosts.come(listed);
    for (int i = 0; i < host.ranks; ++i) {
      const int number = host.first_rank + i;
      const bool begins = number < plan.world_size - plan.spares;
      roster.add({.number = number,
                  .agent = host.index,
                  .host = host.name,
                  .slot = host.first_local + i,
                  .stage = KnownWorker::Stage::Running,
                  .first = begins,
                  .counted = begins});
    }
  }
  next_worker = plan.world_size;
  roster.begin();
}

bool Standing::changes_are_used_up() const {
  return options.most_changes && changes() >= static_cast<std::uint64_t>(*options.most_changes);
}

int Standing::most() const { return options.most > 0 ? options.most : kMostProcesses; }

int Standing::room() const {
  if (over || finishing || changes_are_used_up()) return 0;
  return std::max(0, most() - roster.size());
}

Result<void> Standing::can_spare(int workers) const {
  if (over) return fail(ErrorCode::Unavailable, "the job is about to end");
  if (finishing) return fail(ErrorCode::Unavailable, "ranks have done their part: the job is about to end");
  if (wait_limit) return fail(ErrorCode::Unavailable, "the job has too few ranks, and waits for hosts");
  if (doubt_limit) return fail(ErrorCode::Unavailable, "it is not known yet who has the training's state");
  if (changes_are_used_up())
    return fail(ErrorCode::Unavailable, "its members have changed {} times (--reset-limit)", changes());
  if (roster.size() - workers < options.least)
    return fail(ErrorCode::Unavailable, "fewer than --min-np {} would be left", options.least);
  return {};
}

bool Standing::can_lose(const std::vector<int>& workers, bool others_return) const {
  const int left = roster.size() - static_cast<int>(workers.size());
  if (over || finishing || doubt_limit || changes_are_used_up()) return false;
  if (left <= 0 || others_return) return others_return;
  return (left >= options.least || options.others_may_come) && !are_last_with_state(workers);
}

bool Standing::is_newcomer(int agent) const {
  const auto found = agents.find(agent);
  return found != agents.end() && found->second.newcomer();
}

std::vector<int> Standing::workers_on(int agent, bool counted) const {
  std::vector<int> workers;
  for (const auto& [number, worker] : roster.all()) {
    if (worker.agent == agent && !worker.ended() && (worker.counted || !counted)) workers.push_back(number);
  }
  return workers;
}

std::vector<int> Standing::workers_of(const std::string& host) const {
  std::vector<int> workers;
  for (const KnownWorker* const worker : roster.counted()) {
    if (worker->host == host) workers.push_back(worker->number);
  }
  return workers;
}

int Standing::latest_agent(const std::string& host) const {
  int latest = -1;
  for (const auto& [index, agent] : agents) {
    if (agent.name == host) latest = index;
  }
  return latest;
}

void Standing::end() noexcept {
  over = true;
  wait_limit = doubt_limit = {};
}

void Standing::give_up(int agent, const std::string& why, bool failed) {
  const std::string& name = agents[agent].name;
  if (failed) hosts.note_failure(name, now);
  say(fmt::format("{}; the job goes on without {}", why, name));
  drop(agent, workers_on(agent, false), false);
}

void Standing::drop(int agent, const std::vector<int>& workers, bool failed) {
  for (const int number : workers) {
    roster.find(number)->stage = KnownWorker::Stage::Ended;
    roster.find(number)->counted = false;
  }
  agents[agent].stage = KnownAgent::Stage::Gone;
  agents[agent].limit.reset();
  act(action::Drop{agent, workers, failed});
}

void Standing::lose(KnownWorker& worker) {
  worker.stage = KnownWorker::Stage::Ended;
  worker.counted = false;
  act(action::Lost{worker.number});
}

// Bounds memory: a job of weeks has thousands of workers that have come and gone.
void Standing::forget_ended() {
  if (!running) return;  // the consequences of the ends are not known yet
  roster.forget_ended();
  std::erase_if(agents, [](const auto& one) { return one.second.stage == KnownAgent::Stage::Gone; });
}

}  // namespace cohort::launch
