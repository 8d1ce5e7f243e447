#include "launch/membership/roster.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace cohort::launch {

KnownWorker& Roster::add(KnownWorker worker) {
  const int number = worker.number;
  return workers_.insert_or_assign(number, std::move(worker)).first->second;
}

KnownWorker* Roster::find(int number) {
  const auto found = workers_.find(number);
  return found == workers_.end() ? nullptr : &found->second;
}

bool Roster::runs(int worker) const {
  const auto found = workers_.find(worker);
  return found != workers_.end() && !found->second.ended();
}

bool Roster::anybody_runs() const {
  return std::ranges::any_of(workers_, [](const auto& one) { return !one.second.ended(); });
}

bool Roster::is_counted(int worker) const {
  const auto found = workers_.find(worker);
  return found != workers_.end() && found->second.counted;
}

bool Roster::has_formed(int worker, std::uint64_t epoch) const {
  const auto found = workers_.find(worker);
  return found != workers_.end() && found->second.formed_epoch >= static_cast<std::int64_t>(epoch);
}

void Roster::forget_ended() {
  std::erase_if(workers_,
                [this](const auto& one) { return one.second.ended() && !one.second.counted && !is_member(one.first); });
}

void Roster::report(KnownWorker& worker, std::int64_t formed_epoch, bool has_state) {
  worker.formed_epoch = std::max(worker.formed_epoch, formed_epoch);
  worker.has_state = worker.has_state || has_state;
  state_said_ = state_said_ || has_state;
  latest_formed_ = std::max(latest_formed_, formed_epoch);
}

bool Roster::knows(const KnownWorker& worker) const {
  return worker.first || (state_said_ ? worker.has_state : worker.formed_epoch >= 0);
}

bool Roster::takes_part(int worker) const {
  const auto found = workers_.find(worker);
  return is_member(worker) || (found != workers_.end() && found->second.counted && knows(found->second));
}

int Roster::size() const {
  return static_cast<int>(std::ranges::count_if(workers_, [](const auto& one) { return one.second.counted; }));
}

std::vector<const KnownWorker*> Roster::counted() const {
  std::vector<const KnownWorker*> counted;
  for (const auto& [number, worker] : workers_) {
    if (worker.counted) counted.push_back(&worker);
  }
  return counted;
}

bool Roster::others_know(const std::vector<int>& without) const {
  return std::ranges::any_of(workers_, [&](const auto& one) {
    return one.second.counted && knows(one.second) && std::ranges::find(without, one.first) == without.end();
  });
}

std::map<int, Roster::Age> Roster::ages_of_agents() const {
  std::map<int, Age> ages;
  for (const KnownWorker* const worker : counted()) {
    const Age age = age_of(*worker);
    const auto [at, fresh] = ages.try_emplace(worker->agent, age);
    at->second = std::min(at->second, age);
  }
  return ages;
}

std::vector<int> Roster::youngest_agents_first() const {
  const std::map<int, Age> ages = ages_of_agents();
  std::vector<int> agents;
  for (const auto& [agent, age] : ages) agents.push_back(agent);
  std::ranges::sort(agents, std::greater<>(), [&ages](int agent) { return ages.at(agent); });
  return agents;
}

std::vector<int> Roster::youngest_first(std::vector<int> workers) const {
  std::ranges::sort(workers, std::greater<>(), [this](int worker) { return age_of(workers_.at(worker)); });
  return workers;
}

// Sorts hosts by their oldest workers, so that rank 0 is the oldest worker of all.
std::vector<rendezvous::Member> Roster::by_rank() const {
  const std::map<int, Age> ages = ages_of_agents();
  std::vector<const KnownWorker*> workers = counted();
  std::ranges::sort(workers, {},
                    [&](const KnownWorker* worker) { return std::pair(ages.at(worker->agent), age_of(*worker)); });
  std::vector<rendezvous::Member> members;
  int host_number = -1;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    if (i == 0 || workers[i]->agent != workers[i - 1]->agent) ++host_number;
    members.push_back({workers[i]->number, workers[i]->host, host_number});
  }
  return members;
}

void Roster::note_members() {
  for (const rendezvous::Member& member : current_.members) workers_.at(member.worker).was_member = true;
}

void Roster::begin() {
  current_.members = by_rank();
  current_.cause = "the job's start";
  note_members();
}

void Roster::begin_epoch(const std::string& cause) {
  const auto fresh =
      std::ranges::count_if(workers_, [](const auto& one) { return one.second.counted && !one.second.was_member; });
  const int now = size(), before = static_cast<int>(current_.members.size());
  sizes_ = fresh > 0       ? fmt::format("{} workers, {} of them new", now, fresh)
           : now <= before ? fmt::format("{} of {} workers", now, before)
                           : fmt::format("{} workers", now);
  current_ = {current_.epoch + 1, by_rank(), cause};
  note_members();
}

}  // namespace cohort::launch
