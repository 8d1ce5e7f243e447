#include "launch/membership/departures.h"

#include "base/signals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <iterator>
#include <set>
#include <utility>

namespace cohort::launch {
namespace {

/// A batch system tells all processes of a job to end at about the same moment.
constexpr auto kNoticeTime = std::chrono::milliseconds(200);
constexpr const char* kNoOther = "no other has the training's state yet";

}  // namespace

// ---- leaving workers ----

// The workers end by themselves when they find that the others have a world without them.
void Departures::let_go(const std::vector<int>& agents, Reason reason, const std::string& why,
                        std::optional<Time> limit) {
  std::vector<int> leavers;
  for (const int index : agents) {
    if (job_.agents[index].leaving) {
      // They leave at the end of their step anyway. An earlier signal would tell all ranks that the job is to end.
      for (Leaving& leaving : leaving_) {
        if (leaving.agent == index && !leaving.limit) leaving.limit = limit;
      }
      continue;
    }
    const std::vector<int> counted = job_.workers_on(index, true);
    leavers.insert(leavers.end(), counted.begin(), counted.end());
    job_.agents[index].leaving = true;
    const std::vector<int> all = job_.workers_on(index, false);
    const bool members = std::ranges::any_of(counted, [this](int worker) { return job_.roster.takes_part(worker); });
    // Workers that leave already may be in a step.
    const auto leaves = [this](int worker) { return job_.roster.find(worker)->leaving; };
    if (!members && std::ranges::any_of(all, leaves)) {
      for (const int worker : all) {
        if (!leaves(worker)) job_.act(action::Kill{index, worker});
      }
    } else if (!members) {
      job_.act(action::StopRanks{index, SIGTERM});
    }
    mark_leaving({.reason = reason,
                  .workers = all,
                  .counted = counted,
                  .agent = index,
                  .all = true,
                  .told = !members,
                  .limit = limit});
  }
  std::ranges::sort(leavers);
  let_leave(leavers, why);
}

void Departures::let_some_go(int index, const std::vector<int>& workers, const std::vector<int>& counted,
                             const std::string& why) {
  mark_leaving({.reason = Reason::List, .workers = workers, .counted = counted, .agent = index});
  for (const int worker : workers) {  // nobody has to wait for newcomers
    if (!job_.roster.is_counted(worker)) job_.act(action::Kill{index, worker});
  }
  let_leave(counted, why);
}

void Departures::let_leave(const std::vector<int>& counted, const std::string& why) {
  if (counted.empty()) return;
  succession_.leave(counted,
                    fmt::format("{} {}: {}", names_of_workers(counted), counted.size() == 1 ? "leaves" : "leave", why));
}

void Departures::mark_leaving(Leaving leaving) {
  for (const int number : leaving.workers) {
    job_.roster.find(number)->leaving = true;
    job_.act(action::Leaves{number});
  }
  leaving.epoch = job_.roster.current().epoch + 1;
  leaving.signal = SIGKILL;
  leaving_.push_back(std::move(leaving));
}

void Departures::note_formed() {
  for (Leaving& leaving : leaving_) {
    if (leaving.epoch > job_.roster.current().epoch || std::exchange(leaving.others_went_on, true)) continue;
    leaving.limit = job_.now + job_.options.grace;
    leaving.signal = SIGTERM;
  }
}

void Departures::end_leavers(Leaving& leaving) {
  leaving.told = true;
  if (leaving.all) {
    if (job_.agents[leaving.agent].has_ranks()) job_.act(action::StopRanks{leaving.agent, leaving.signal});
    return;
  }
  for (const int number : leaving.workers) {
    if (job_.roster.runs(number)) job_.act(action::Kill{leaving.agent, number});
  }
}

bool Departures::may_take_back() const {
  const auto returns = [this](int worker) {
    return job_.roster.runs(worker) && job_.roster.knows(*job_.roster.find(worker));
  };
  return std::ranges::any_of(leaving_, [&](const Leaving& leaving) {
    return can_return(leaving) && std::ranges::any_of(leaving.counted, returns);
  });
}

// (A worker that has ended may have formed the world without those that leave.)
bool Departures::can_return(const Leaving& leaving) const {
  const bool others_went_on = job_.roster.latest_formed() >= static_cast<std::int64_t>(leaving.epoch);
  return !others_went_on && !leaving.others_went_on && !leaving.told;
}

std::vector<int> Departures::take_back(int room) {
  std::vector<int> back;
  const auto knows = [this](int worker) { return job_.roster.knows(*job_.roster.find(worker)); };
  for (Leaving& leaving : leaving_) {
    std::erase_if(leaving.counted, [this](int worker) { return !job_.roster.runs(worker); });
    if (!can_return(leaving)) continue;
    std::stable_partition(leaving.counted.begin(), leaving.counted.end(), knows);
    const auto end = leaving.counted.begin() + std::min(std::ssize(leaving.counted), std::ptrdiff_t{room});
    const std::vector<int> taken(leaving.counted.begin(), end);
    if (taken.empty()) continue;
    leaving.counted.erase(leaving.counted.begin(), end);  // the others may be needed later
    room -= static_cast<int>(taken.size());
    back.insert(back.end(), taken.begin(), taken.end());
    take_back(leaving, taken);
  }
  std::erase_if(leaving_, [](const Leaving& leaving) { return leaving.workers.empty(); });
  std::ranges::sort(back);
  return back;
}

void Departures::take_back(const Leaving& leaving, const std::vector<int>& taken) {
  for (const int number : taken) {
    KnownWorker& worker = *job_.roster.find(number);
    worker.leaving = false;
    worker.counted = true;
    job_.act(action::Leaves{number, false});
    for (Leaving& one : leaving_) std::erase(one.workers, number);
  }
  job_.agents[leaving.agent].leaving = false;
  for (Leaving& one : leaving_) one.all = one.all && one.agent != leaving.agent;  // its other workers leave one by one
  hold_again(leaving);
}

void Departures::hold_again(const Leaving& leaving) {
  const std::string& host = job_.agents[leaving.agent].name;
  const auto is_this = [&host](const Held& held) { return held.host == host; };
  switch (leaving.reason) {
    case Reason::List: unspared_[host] = kNoOther; break;
    case Reason::Order:
      if (std::ranges::none_of(held_, is_this)) held_.push_back({.host = host});
      break;
    case Reason::Notice:
      hold_notice(leaving.agent, std::max(job_.now, *leaving.limit - job_.options.preempt_grace / 2));
      break;
  }
}

void Departures::forget() {
  std::erase_if(leaving_, [this](const Leaving& leaving) {
    const auto agent = job_.agents.find(leaving.agent);
    if (agent == job_.agents.end() || !agent->second.has_ranks()) return true;
    return !leaving.all && std::ranges::none_of(leaving.workers, [this](int one) { return job_.roster.runs(one); });
  });
  std::erase_if(unspared_, [this](const auto& one) {
    return std::ranges::none_of(job_.agents, [&one](const auto& agent) { return agent.second.name == one.first; });
  });
}

void Departures::look() {
  const auto due = [this](std::optional<Time>& time) { return time && *time <= job_.now && (time.reset(), true); };
  if (due(notices_at_)) act_on_notices();
  for (Leaving& leaving : leaving_) {
    if (due(leaving.limit)) end_leavers(leaving);
  }
  for (std::size_t i = 0; i < held_.size() && job_.may_change(); ++i) {
    if (due(held_[i].limit)) succession_.end_as_told(held_[i].agent, held_[i].signal);
  }
}

std::optional<Standing::Time> Departures::next_look() const {
  std::optional<Time> next = notices_at_;
  const auto consider = [&next](const std::optional<Time>& time) {
    if (time && (!next || *time < *next)) next = time;
  };
  for (const Leaving& leaving : leaving_) consider(leaving.limit);
  for (const Held& held : held_) consider(held.limit);
  return next;
}

void Departures::end() {
  notices_at_.reset();
  leaving_.clear();
  held_.clear();
}

// ---- orders ----

Result<std::string> Departures::take_away(const std::string& host, bool kill) {
  std::vector<int> going;
  std::set<std::string> others;
  for (const auto& [index, agent] : job_.agents) {
    if (!agent.has_ranks()) continue;
    if (agent.name == host)
      going.push_back(index);
    else
      others.insert(agent.name);
  }
  const std::vector<int> workers = job_.workers_of(host);
  if (going.empty())
    return fail(ErrorCode::Unavailable, "nothing of the job runs on {}; it runs on {}", host, fmt::join(others, ", "));
  if (std::ranges::any_of(workers, [this](int worker) { return job_.roster.takes_part(worker); })) {
    if (auto spare = job_.can_spare(static_cast<int>(workers.size())); !spare) return tl::unexpected(spare.error());
    if (job_.are_last_with_state(workers)) {
      keep(host);
      held_.push_back({kill, host});
      const std::string text =
          fmt::format("no other worker has the training's state yet: host {} is {} once another has it", host,
                      kill ? "removed" : "drained");
      job_.say(text);
      return text;
    }
  }
  job_.hosts.take_away(host);
  const auto epoch = job_.roster.current().epoch;
  for (const int index : going) {
    if (job_.is_newcomer(index)) job_.give_up(index, fmt::format("host {} is taken away (cohort ctl)", host), false);
  }
  std::erase_if(going, [this](int index) { return !job_.agents[index].has_ranks(); });
  const bool leave_already =
      !kill && !going.empty() && std::ranges::all_of(going, [this](int index) { return job_.agents[index].leaving; });
  let_go(going, Reason::Order, fmt::format("host {} is {} (cohort ctl)", host, kill ? "removed" : "drained"), {});
  if (kill) {
    for (Leaving& leaving : leaving_) leaving.told = leaving.told || std::ranges::count(going, leaving.agent) > 0;
    for (const int index : going) job_.act(action::StopRanks{index, SIGKILL});
  }
  const rendezvous::Membership& now = job_.roster.current();
  if (now.epoch == epoch && leave_already) return fmt::format("{} leaves", host);
  if (now.epoch == epoch) return fmt::format("{} has no members; what runs there is ended", host);
  return fmt::format("{}; epoch {} goes on with {}", now.cause, now.epoch, job_.roster.sizes());
}

void Departures::keep(const std::string& host) {
  std::erase_if(held_, [&host](const Held& held) { return held.host == host; });
}

void Departures::look_for_held() {
  if (job_.options.asks_script && !unspared_.empty()) drain_unlisted();
  for (const Held& held : std::vector<Held>(held_)) {
    if (held.is_notice()) {
      act_on_notices();
      continue;
    }
    const std::vector<int> workers = job_.workers_of(held.host);
    if (job_.are_last_with_state(workers)) continue;
    keep(held.host);
    if (workers.empty() || !job_.may_change()) continue;
    if (const auto done = take_away(held.host, held.kill); !done)
      job_.say(fmt::format("host {} stays: {}", held.host, done.error().what()));
  }
}

// ---- lists ----

void Departures::drain_unlisted() {
  std::vector<int> order;
  for (const auto& [index, agent] : job_.agents) {
    if (agent.has_ranks() && !agent.leaving && job_.workers_on(index, true).empty()) order.push_back(index);
  }
  const std::vector<int> with_members = job_.roster.youngest_agents_first();
  order.insert(order.end(), with_members.begin(), with_members.end());
  for (const int index : order) drain_unlisted(index);
}

void Departures::drain_unlisted(int index) {
  const KnownAgent& agent = job_.agents[index];
  const auto slots = static_cast<std::size_t>(job_.hosts.slots_of(agent.name));
  std::vector<int> workers = job_.workers_on(index, false);
  std::erase_if(workers, [this](int worker) { return job_.roster.find(worker)->leaving; });
  if (agent.leaving || !job_.may_change() || (slots > 0 && workers.size() <= slots)) {
    unspared_.erase(agent.name);
    return;
  }
  const std::string why = slots == 0
                              ? fmt::format("host {} is listed no more", agent.name)
                              : fmt::format("host {} is listed with {} slot{}", agent.name, slots, plural(slots));
  if (agent.newcomer()) {
    if (slots == 0) job_.give_up(index, why, false);
    return;
  }
  // (Workers that are no members yet come first.)
  const auto fresh = [this](int worker) { return !job_.roster.is_counted(worker); };
  workers = job_.roster.youngest_first(std::move(workers));
  std::stable_partition(workers.begin(), workers.end(), fresh);
  workers.resize(workers.size() - slots);
  std::vector<int> leavers;
  std::ranges::copy_if(workers, std::back_inserter(leavers), [&](int worker) { return !fresh(worker); });
  std::ranges::sort(leavers);
  if (leavers.empty() && slots == 0) job_.say(why + "; what runs there is ended");
  if (!leavers.empty()) {
    const auto spare = job_.can_spare(static_cast<int>(leavers.size()));
    const std::string stays = !spare                              ? spare.error().what()
                              : job_.are_last_with_state(leavers) ? kNoOther
                                                                  : std::string();
    if (!stays.empty()) {
      if (std::exchange(unspared_[agent.name], stays) != stays)
        job_.say(fmt::format("{}, and its {} {}: {}", why, names_of_workers(leavers),
                             leavers.size() == 1 ? "stays" : "stay", stays));
      return;
    }
  }
  unspared_.erase(agent.name);
  if (slots == 0)
    let_go({index}, Reason::List, why, {});
  else
    let_some_go(index, workers, leavers, why);
}

// ---- notices ----

void Departures::note_notice() {
  if (!notices_at_) notices_at_ = job_.now + kNoticeTime;
}

void Departures::hold_notice(int agent, Time limit) {
  if (std::ranges::none_of(held_, &Held::is_notice))
    held_.push_back({.limit = limit, .agent = agent, .signal = SIGTERM});
}

void Departures::act_on_notices() {
  if (!job_.may_change()) return;
  std::vector<int> going, workers;
  std::string names;
  for (const auto& [index, agent] : job_.agents) {
    if (!agent.noticed || agent.leaving || !agent.has_ranks()) continue;
    going.push_back(index);
    names += (names.empty() ? "" : ", ") + agent.name;
    const std::vector<int> counted = job_.workers_on(index, true);
    workers.insert(workers.end(), counted.begin(), counted.end());
  }
  if (going.empty()) return void(std::erase_if(held_, [](const Held& held) { return held.is_notice(); }));
  const std::string why = fmt::format("the agent{} of {} {} told to end by {}", plural(going.size()), names,
                                      going.size() == 1 ? "was" : "were", sys::signal_name(SIGTERM));
  if (!workers.empty() && !job_.can_lose(workers)) {
    // Another worker may get the state soon; if not, ranks that are told late have half of the time to save it.
    const bool soon = static_cast<int>(workers.size()) < job_.roster.size() && job_.are_last_with_state(workers);
    if (std::ranges::any_of(held_, &Held::is_notice)) return;  // an earlier notice is held until its limit
    if (!soon) return succession_.end_as_told(going.front(), SIGTERM);
    hold_notice(going.front(), job_.now + job_.options.preempt_grace / 2);
    return job_.say(fmt::format("{}; no other worker has the training's state yet: {} once another has it", why,
                                workers.size() == 1 ? "it leaves" : "they leave"));
  }
  std::erase_if(held_, [](const Held& held) { return held.is_notice(); });
  for (const int index : going) job_.hosts.bar(job_.agents[index].name);
  // (SIGTERM would make all ranks that are still in a world with the others save and end.)
  let_go(going, Reason::Notice, why, job_.now + job_.options.preempt_grace);
}

}  // namespace cohort::launch
