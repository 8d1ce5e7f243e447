#include "launch/membership/newcomers.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace cohort::launch {
namespace {

/// Interval at which hosts are searched for free slots, if there is no script.
constexpr auto kFillEvery = std::chrono::seconds(1);

}  // namespace

void Newcomers::begin() {
  if (!job_.options.asks_script) fill_at_ = job_.now + kFillEvery;
}

void Newcomers::look() {
  if (fill_at_ && *fill_at_ <= job_.now) {
    fill_at_ = job_.now + kFillEvery;
    fill();
  }
}

std::optional<Standing::Time> Newcomers::next_look() const {
  std::optional<Standing::Time> next = fill_at_;
  for (const auto& [index, agent] : job_.agents) {
    if (agent.limit && (!next || *agent.limit < *next)) next = agent.limit;
  }
  return next;
}

void Newcomers::fill() {
  if (!job_.may_change() || job_.finishing || job_.doubt_limit) return;
  int room = job_.room() + job_.options.spares - on_their_way();
  for (const auto& [number, worker] : job_.roster.all()) room -= worker.newcomer() ? 1 : 0;
  for (const PlannedHost& host : job_.hosts.listed()) {
    if (room <= 0) return;
    if (!job_.hosts.may_use(host.name, job_.now)) continue;
    std::vector<int> free = free_slots(host);
    free.resize(std::min(free.size(), static_cast<std::size_t>(room)));
    if (!free.empty()) room -= bring(host, free);
  }
}

int Newcomers::on_their_way() const {
  auto workers = std::ranges::count_if(job_.roster.all(),
                                       [](const auto& one) { return one.second.stage == KnownWorker::Stage::Ordered; });
  for (const auto& [index, agent] : job_.agents) workers += agent.stage == KnownAgent::Stage::Coming ? agent.slots : 0;
  return static_cast<int>(workers);
}

std::vector<int> Newcomers::free_slots(const PlannedHost& host) const {
  if (const int latest = job_.latest_agent(host.name); latest >= 0) {
    if (job_.agents.at(latest).newcomer() || job_.agents.at(latest).leaving) return {};
  }
  std::set<int> taken;
  for (const auto& [number, worker] : job_.roster.all()) {
    if (!worker.ended() && worker.host == host.name) taken.insert(worker.slot);
  }
  const auto most = std::max(0, host.slots - static_cast<int>(taken.size()));
  std::vector<int> free;
  for (int slot = 0; slot < host.slots && static_cast<int>(free.size()) < most; ++slot) {
    if (!taken.contains(slot) && !job_.hosts.is_held(host.name, slot, job_.now)) free.push_back(slot);
  }
  return free;
}

int Newcomers::bring(const PlannedHost& host, const std::vector<int>& slots) {
  const int count = static_cast<int>(slots.size());
  const int latest = job_.latest_agent(host.name);
  const KnownAgent coming{host.name, count, KnownAgent::Stage::Coming, job_.now + job_.options.start_timeout};
  if (latest >= 0 && job_.agents[latest].stage == KnownAgent::Stage::Running) {
    for (const int slot : slots) {
      job_.roster.add({.number = job_.next_worker, .agent = latest, .host = host.name, .slot = slot});
      job_.act(action::StartOne{latest, job_.next_worker++, slot});
    }
  } else if (latest >= 0 && job_.agents[latest].stage == KnownAgent::Stage::Idle) {
    job_.agents[latest] = coming;
    start_ranks(latest);
  } else if (!job_.options.come_by_themselves) {
    job_.agents[job_.next_agent++] = coming;
    PlannedHost wanted = host;
    wanted.slots = count;
    job_.act(action::AddAgent{std::move(wanted)});
  } else {
    return 0;
  }
  return count;
}

void Newcomers::take(const PlannedHost& host) {
  const int index = host.index;
  job_.next_agent = std::max(job_.next_agent, index + 1);
  if (job_.begins_anew()) {
    job_.agents[index] = {host.name, host.slots, KnownAgent::Stage::Idle};
    job_.act(action::Hold{index});
    return job_.say(fmt::format("{} has come; it takes part once all ranks are started again", host.name));
  }
  job_.agents[index] = {host.name, host.slots, KnownAgent::Stage::Coming, job_.now + job_.options.start_timeout};
  job_.hosts.come(host);
  start_ranks(index);
}

void Newcomers::start_ranks(int index) {
  KnownAgent& agent = job_.agents[index];
  if (!job_.may_change() || job_.finishing || job_.room() + job_.options.spares < agent.slots) {
    agent.limit.reset();
    agent.stage = KnownAgent::Stage::Gone;  // the job is about to end, or is full
    return job_.act(action::Finish{index});
  }
  agent.stage = KnownAgent::Stage::Starting;
  job_.act(action::StartRanks{index, agent.slots, job_.next_worker});
  for (int slot = 0; slot < agent.slots; ++slot)
    job_.roster.add({.number = job_.next_worker++, .agent = index, .host = agent.name, .slot = slot});
}

}  // namespace cohort::launch
