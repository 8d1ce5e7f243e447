#include "launch/supervise/elastic_members.h"

#include <cohort/exit_status.h>

#include "base/parse.h"
#include "base/signals.h"
#include "launch/start/hosts.h"
#include "telemetry/status_page.h"

#include <algorithm>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

/// A batch system tells all processes of a job to end at about the same moment.
constexpr auto kNoticeTime = std::chrono::milliseconds(200);

/// " (ranks 0-2 are workers 0,2-3)"; empty where the numbers are the same.
std::string numbering_of(const rendezvous::Membership& now) {
  const std::vector<int> workers = workers_of(now);
  bool same = true;
  for (std::size_t rank = 0; rank < workers.size(); ++rank) same = same && workers[rank] == static_cast<int>(rank);
  if (same) return {};
  if (workers.size() == 1) return fmt::format(" (rank 0 is worker {})", workers.front());
  return fmt::format(" (ranks 0-{} are workers {})", workers.size() - 1, to_ranges(workers));
}

/// Those that begin as members; its spares come behind them.
std::vector<Elastic::Worker> first_members(const Plan& plan) {
  std::vector<Elastic::Worker> workers;
  for (const PlannedHost& host : plan.hosts) {
    for (int i = 0; i < host.ranks; ++i) workers.push_back({host.first_rank + i, host.index, host.name});
  }
  workers.resize(workers.size() - static_cast<std::size_t>(plan.spares));
  return workers;
}

Elastic::Limits limits_of(const JobSpec& spec, const Plan& plan, std::uint64_t first_epoch) {
  Elastic::Limits limits{plan.least, spec.elastic.most, spec.elastic.most_changes};
  if (limits.most == 0 && spec.elastic.spares > 0) limits.most = plan.world_size - plan.spares;
  limits.others_may_come = !spec.elastic.script.empty() || spec.elastic.cooldown.has_value();
  limits.first_epoch = first_epoch;
  return limits;
}

}  // namespace

ElasticMembers::ElasticMembers(Scene scene, Events events)
    : loop_(scene.loop),
      setup_(scene.setup),
      agents_(scene.agents),
      run_(scene.run),
      members_(scene.members),
      health_(scene.health),
      endings_(scene.endings),
      events_(std::move(events)),
      places_(spec_.elastic.cooldown, scene.past.barred),
      elastic_(limits_of(spec_, setup_.plan, scene.past.next_epoch), first_members(setup_.plan)),
      worlds_(static_cast<std::size_t>(setup_.plan.world_size), 0),
      worlds_then_(worlds_) {
  run_.state().members = {{utc_now(), elastic_.current()}};
  for (const PlannedHost& host : setup_.plan.hosts) {
    places_.take_all(host);
    PlannedHost listed = host;
    listed.slots = host.ranks;
    places_.come(listed);
  }
}

void ElasticMembers::begin() {
  for (const PlannedHost& host : setup_.plan.hosts) {
    for (const int worker : processes_of(setup_.plan, host)) {
      if (!members_.has_ended(worker) && !rendezvous::place_of(elastic_.current(), worker))
        arrivals_.emplace(worker, Elastic::Worker{worker, host.index, host.name});
    }
  }
  if (spec_.elastic.script.empty()) return fill_again();
  discovery_.emplace(loop_, spec_, setup_.plan.method,
                     Discovery::Events{[this](const std::vector<PlannedHost>& hosts) { on_hosts(hosts); },
                                       [this](const std::string& trouble) { say(trouble); }});
}

void ElasticMembers::stop() {
  discovery_.reset();
  newcomers_.clear();
  leaving_.clear();
  noticed_.clear();
  notice_ = Timer();
  patience_ = Timer();
  fill_ = Timer();
}

void ElasticMembers::let_failed_leave() {
  if (!may_change()) return;
  std::vector<int> workers;
  std::vector<std::size_t> on_notice;
  std::string cause;
  const bool anew = begins_anew();
  for (; considered_ < endings_.size(); ++considered_) {
    Ending& ending = endings_[considered_];
    const bool is_member = rendezvous::place_of(elastic_.current(), ending.rank).has_value();
    // (Where all ranks save and end together, the job does.)
    const bool notice = asks_for_requeue(ending) && ending.last.preempted_by == 0;
    if (has_ended_well(ending) && !(notice && !elastic_.finishing())) {
      elastic_.finish(ending.rank);
      waiting_.clear();
      if (!is_member && !ending.status.success()) ending.spared = true;
      continue;
    }
    if (anew && !notice) continue;
    if (!is_member) {
      const std::string how = how_left(ending);
      ending.spared = true;
      health_.left(ending.rank);
      if (arrivals_.erase(ending.rank) == 0) continue;  // it was to leave: it ends by itself
      if (!notice) places_.note_failure(ending.host, Clock::now());
      say(how + " before it was a member; the job goes on without it");
      continue;
    }
    cause += (cause.empty() ? "" : "; ") + how_left(ending);
    workers.push_back(ending.rank);
    if (notice) {
      on_notice.push_back(considered_);
      // Its place goes on as little as that of one that has failed.
      places_.hold(ending.rank, Clock::now());
    } else {
      places_.note_failure(ending.host, Clock::now());
      fresh_leavers_.push_back(considered_);
    }
    ending.spared = true;
    health_.left(ending.rank);
  }
  if (workers.empty()) return;
  const bool failed = on_notice.size() < workers.size();
  if (leave(workers, cause)) return;
  for (const std::size_t ending : on_notice) endings_[ending].spared = false;
  if (!failed && members_.running_ranks() > 0) end_for_requeue("too many workers have left on notice");
}

std::string ElasticMembers::how_left(const Ending& ending) const {
  const std::string who = fmt::format("worker {} ({})", ending.rank, ending.host);
  if (asks_for_requeue(ending)) return who + " left on notice";
  if (const auto stopped = stopped_.find(ending.rank); stopped != stopped_.end() && ending.status.signal == SIGKILL)
    return fmt::format("{} was stopped for {} s and is killed", who, stopped->second.count());
  return ending.status.signal != 0 ? fmt::format("{} was {}", who, sys::to_string(ending.status))
                                   : fmt::format("{} ended with {}", who, sys::to_string(ending.status));
}

std::vector<Elastic::Worker> ElasticMembers::ready() const {
  std::vector<Elastic::Worker> workers;
  for (const auto& [number, worker] : arrivals_) {
    if (waiting_arrivals_.contains(number)) workers.push_back(worker);
  }
  return workers;
}

bool ElasticMembers::leave(const std::vector<int>& workers, const std::string& cause) {
  const bool goes_on = follow(elastic_.leave(workers, cause, ready()), cause);
  std::erase_if(arrivals_, [this](const auto& one) { return rendezvous::place_of(elastic_.current(), one.first); });
  return goes_on;
}

// Who is left may save where it can; whoever starts the job again gets it on other hosts.
void ElasticMembers::end_for_requeue(const std::string& why) {
  events_.end(kRequeueStatus,
              fmt::format("{}; exit status {} asks for the job to be started again", why, kRequeueStatus));
}

bool ElasticMembers::goes_on_without(AgentHandle& agent, const std::string& why) {
  // (As ranks start, none may have failed before: what that means is known when all run.)
  const bool starts = events_.starting() && !elastic_.over() && considered_ == endings_.size();
  if ((!may_change() && !starts) || agent.all_gone) return false;
  if (is_newcomer(agent)) {
    give_up_newcomer(agent, fmt::format("{} is lost ({})", agent.host.name, why));
    return true;
  }
  const std::vector<int> processes = processes_on(setup_.plan, agent.host.index);
  const rendezvous::Membership before = elastic_.current();
  bool fails = false;  // all begin anew
  std::vector<int> lost;
  std::ranges::copy_if(processes, std::back_inserter(lost), [this](int one) { return !members_.has_ended(one); });
  if (lost.empty()) {
    say(fmt::format("{} is lost ({}), where nothing ran any more", agent.host.name, why));
  } else {
    const bool one = lost.size() == 1;
    const std::string cause = fmt::format("worker{} {} {} lost with {} host {} ({})", one ? "" : "s", to_ranges(lost),
                                          one ? "is" : "are", one ? "its" : "their", agent.host.name, why);
    const bool members =
        std::ranges::any_of(lost, [&before](int worker) { return place_of(before, worker).has_value(); });
    fails = members && begins_anew();
    if (!members) {
      say(cause + " before it was a member; the job goes on without");
    } else if (fails) {
      say(cause);
    } else if (!leave(lost, cause)) {
      if (spec_.max_restarts == 0) return false;
      fails = true;
    }
  }
  places_.note_failure(agent.host.name, Clock::now());
  agent.started = agent.all_gone = agent.lost = true;
  AgentPool::kill(agent);  // its guard, if it lives, ends what is left
  for (const int process : lost) {
    end_lost(process);
    if (fails)
      endings_.back().spared = false;
    else if (rendezvous::place_of(before, process))
      fresh_leavers_.push_back(endings_.size() - 1);
  }
  health_.host_ended(processes);
  if (fails) events_.look_for_failure();
  return true;
}

bool ElasticMembers::kills_stopped(AgentHandle& agent, int worker, std::chrono::seconds since) {
  if (!may_change() || begins_anew()) return false;
  if (stopped_.contains(worker)) return true;
  const auto is_member = [this](int one) { return rendezvous::place_of(elastic_.current(), one).has_value(); };
  const auto dying = std::ranges::count_if(
      stopped_, [&](const auto& one) { return is_member(one.first) && !members_.has_ended(one.first); });
  if (is_member(worker) && !elastic_.can_lose(static_cast<int>(dying) + 1)) return false;
  stopped_.emplace(worker, since);
  agent.channel->send(KillWorker{worker});
  return true;
}

void ElasticMembers::end_lost(int process) {
  events_.end_lost(process);
  health_.left(process);
  endings_.back().spared = true;
  considered_ = endings_.size();
  arrivals_.erase(process);
  ordered_.erase(process);
}

bool ElasticMembers::follow(const Elastic::Decision& decision, const std::string& cause) {
  switch (decision.kind) {
    case Elastic::Decision::Kind::Nothing:
      if (elastic_.waits()) say(cause + "; waiting for more hosts");
      return true;
    case Elastic::Decision::Kind::Announce: announce(); return true;
    case Elastic::Decision::Kind::Wait: {
      const auto limit = spec_.elastic.timeout.value_or(kElasticTimeout);
      say(fmt::format("{}; {}: waiting up to {} s for hosts", cause, decision.why, limit.count()));
      patience_ = Timer(loop_, limit, [this, limit] {
        const auto over =
            elastic_.give_up(fmt::format("no hosts have come within {} s (--elastic-timeout)", limit.count()));
        if (over.kind == Elastic::Decision::Kind::End) end_for_requeue(over.why);
      });
      return true;
    }
    case Elastic::Decision::Kind::End:
      say(fmt::format("{}; the job cannot go on: {}", cause, decision.why));
      for (const std::size_t ending : std::exchange(fresh_leavers_, {})) endings_[ending].spared = false;
      return false;
  }
  return false;
}

void ElasticMembers::announce() {
  const rendezvous::Membership& now = elastic_.current();
  patience_ = Timer();
  worlds_then_ = worlds_;
  try {
    events_.on_members(now);
  } catch (const Error& error) {
    return events_.end(1, fmt::format("the job's store does not take its new members: {}", error.what()));
  }
  agents_.broadcast(NewMembership{now.epoch});
  announced_at_ = Clock::now();
  run_.members_changed(
      now, fmt::format("{}; epoch {} goes on with {}{}", now.cause, now.epoch, elastic_.sizes(), numbering_of(now)));
}

void ElasticMembers::look_for_members() {
  if (!events_.running() || workers_ended_ || members_.running_ranks() == 0) return;
  const auto& members = elastic_.current().members;
  if (elastic_.waits() || std::ranges::any_of(members, [this](const rendezvous::Member& member) {
        return !members_.has_ended(member.worker);
      }))
    return;
  end_workers();
}

void ElasticMembers::end_workers() {
  workers_ended_ = true;
  events_.end_workers();
}

void ElasticMembers::take(const Reports& reports) {
  for (const RankReport& report : reports.ranks) {
    if (report.rank < 0 || static_cast<std::size_t>(report.rank) >= worlds_.size()) continue;
    const auto rank = static_cast<std::size_t>(report.rank);
    worlds_[rank] = report.worlds;
    if (report.joining != 0)
      waiting_.insert(report.rank);
    else
      waiting_.erase(report.rank);
    if (report.joining == status::StatusLayout::kToBeMember) waiting_arrivals_.insert(report.rank);
    if (elastic_.waits() || report.worlds <= worlds_then_[rank]) continue;
    // Who goes on has formed a world.
    if (!std::exchange(fresh_leavers_, {}).empty()) events_.on_failure_over();
    for (auto& [agent, leaving] : leaving_) {
      if (!std::exchange(leaving.others_went_on, true))
        leaving.limit = Timer(loop_, spec_.grace, [this, one = agent] { end_leavers(*one, SIGTERM); });
    }
  }
  if (announced_at_) look_for_formed();
  if (events_.running() && !arrivals_.empty()) take_arrivals();
  look_for_waiting();
}

void ElasticMembers::look_for_formed() {
  const bool formed = std::ranges::all_of(elastic_.current().members, [this](const rendezvous::Member& member) {
    const auto rank = static_cast<std::size_t>(member.worker);
    return worlds_[rank] > worlds_then_[rank];
  });
  if (!formed) return;
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - *announced_at_);
  announced_at_.reset();
  run_.members_formed(took);
}

void ElasticMembers::look_for_waiting() {
  if (!elastic_.finishing() || workers_ended_ || !may_change()) return;
  // Where nobody has trained, a rank that ended well may be why the others wait: that is a failure, which health names.
  if (nobody_trains()) return;
  bool knows_the_training = false;
  for (int process = 0; process < members_.roles().workers; ++process) {
    if (members_.has_ended(process)) continue;
    if (!waiting_.contains(process)) return;
    knows_the_training = knows_the_training || worlds_[static_cast<std::size_t>(process)] > 0;
  }
  waiting_.clear();
  if (knows_the_training) {
    (void)follow(elastic_.leave_out_finished(), "others have done their part");
  } else if (members_.running_ranks() > 0) {
    say("the training is over; workers that have only come are ended");
    end_workers();
  }
}

// ---- hosts that come and go ----

AgentHandle* ElasticMembers::latest_of(const std::string& host) const {
  AgentHandle* latest = nullptr;
  for (const auto& member : agents_.members()) {
    if (member->host.name == host) latest = member.get();
  }
  return latest;
}

void ElasticMembers::on_hosts(const std::vector<PlannedHost>& listed) {
  if (!may_change()) return;
  places_.list(listed);
  drain_unlisted();
  fill();
}

void ElasticMembers::fill_again() {
  fill_ = Timer(loop_, std::chrono::seconds(1), [this] {
    fill();
    fill_again();
  });
}

void ElasticMembers::fill() {
  if (!may_change() || elastic_.finishing()) return;
  int room = elastic_.room() + spec_.elastic.spares - static_cast<int>(arrivals_.size() + ordered_.size());
  for (const auto& [agent, limit] : newcomers_) room -= agent->host.slots;
  for (const PlannedHost& host : places_.listed()) {
    if (room <= 0) return;
    if (!places_.may_use(host.name, Clock::now())) continue;
    std::vector<int> free = free_slots(host);
    if (static_cast<int>(free.size()) > room) free.resize(static_cast<std::size_t>(room));
    room -= static_cast<int>(free.size());
    if (!free.empty()) bring(host, free);
  }
}

std::vector<int> ElasticMembers::free_slots(const PlannedHost& host) const {
  AgentHandle* const here = latest_of(host.name);
  if (here != nullptr && (newcomers_.contains(here) || leaving_.contains(here))) return {};
  return places_.free_slots(
      host, [this](int worker) { return members_.has_ended(worker); }, Clock::now());
}

void ElasticMembers::bring(const PlannedHost& host, const std::vector<int>& slots) {
  try {
    AgentHandle* agent = latest_of(host.name);
    const bool there = agent != nullptr && AgentPool::is_usable(*agent);
    if (there && !agent->all_gone) {
      for (const int slot : slots) {
        const int number = events_.on_one_more(*agent, slot);
        ordered_[number] = {number, agent->host.index, agent->host.name};
        places_.take(number, host.name, slot);
      }
      return;
    }
    if (agent != nullptr && !agent->all_gone) return;  // its loss is heard of soon
    if (!there && comes_by_itself(setup_.plan.method)) return;
    PlannedHost wanted = host;
    wanted.slots = static_cast<int>(slots.size());
    if (there)
      agent->host.slots = wanted.slots;
    else
      agent = &agents_.add(std::move(wanted));
    newcomers_[agent] = Timer(loop_, start_timeout_, [this, agent] {
      give_up_newcomer(*agent, fmt::format("no sign of running ranks from {} after {:.0f} s", agent->host.name,
                                           std::chrono::duration<double>(start_timeout_).count()));
    });
    if (there) take_newcomer(*agent);
  } catch (const Error& error) {
    places_.note_failure(host.name, Clock::now());
    say(fmt::format("{} cannot be had: {}", host.name, error.what()));
  }
}

void ElasticMembers::on_one_started(const StartedAgain& started) {
  Elastic::Worker worker = ordered_.extract(started.rank).mapped();
  run_.changed();
  if (started.pid != 0) {
    arrivals_.emplace(started.rank, std::move(worker));
    return;
  }
  places_.note_failure(worker.host_name, Clock::now());
  say(fmt::format("worker {} cannot be started on {}: {}", started.rank, worker.host_name, started.why));
  end_lost(started.rank);
  events_.check_end();
}

void ElasticMembers::take_newcomer(AgentHandle& agent) {
  if (elastic_.room() + spec_.elastic.spares >= agent.host.slots) {
    events_.on_more(agent, agent.host.slots);
    return places_.take_all(agent.host);
  }
  newcomers_.erase(&agent);  // the job is about to end, or has as many as it may
  agent.all_gone = true;
  agent.channel->send(Finish{});
  events_.check_end();
}

void ElasticMembers::grow() {
  worlds_.resize(static_cast<std::size_t>(setup_.plan.world_size), 0);
  worlds_then_.resize(worlds_.size(), 0);
}

void ElasticMembers::on_newcomer_started(AgentHandle& agent) {
  newcomers_.erase(&agent);
  run_.changed();
  for (const int number : processes_of(setup_.plan, agent.host))
    arrivals_.emplace(number, Elastic::Worker{number, agent.host.index, agent.host.name});
}

void ElasticMembers::take_arrivals() {
  std::map<int, std::vector<Elastic::Worker>> hosts;
  std::set<int> late;
  for (const auto& [number, worker] : arrivals_) {
    hosts[worker.host].push_back(worker);
    if (!waiting_arrivals_.contains(number)) late.insert(worker.host);
  }
  for (auto& [host, workers] : hosts) {
    if (late.contains(host)) continue;
    workers.resize(std::min(workers.size(), static_cast<std::size_t>(elastic_.room())));
    if (workers.empty()) continue;
    std::vector<int> numbers;
    for (const Elastic::Worker& worker : workers) {
      numbers.push_back(worker.number);
      arrivals_.erase(worker.number);
    }
    const bool one = numbers.size() == 1;
    const std::string& name = workers.front().host_name;
    const bool knows = std::ranges::any_of(elastic_.current().members,
                                           [&name](const rendezvous::Member& member) { return member.host == name; });
    const std::string cause =
        knows ? fmt::format("worker{} {} {} come on {}", one ? "" : "s", to_ranges(numbers), one ? "has" : "have", name)
              : fmt::format("host {} has come with worker{} {}", name, one ? "" : "s", to_ranges(numbers));
    (void)follow(elastic_.come(workers, cause), cause);
  }
}

void ElasticMembers::give_up_newcomer(AgentHandle& agent, const std::string& why) {
  newcomers_.erase(&agent);
  places_.note_failure(agent.host.name, Clock::now());
  say(fmt::format("{}; the job goes on without {}", why, agent.host.name));
  for (const int process : processes_of(setup_.plan, agent.host)) {
    if (!members_.has_ended(process)) end_lost(process);
  }
  agent.all_gone = agent.lost = true;
  AgentPool::kill(agent);
  events_.check_end();
}

bool ElasticMembers::nobody_trains() const {
  return std::ranges::all_of(worlds_, [](std::uint32_t formed) { return formed == 0; });
}

void ElasticMembers::take_late(AgentHandle& agent) {
  if (begins_anew()) {
    agent.started = agent.all_gone = true;
    say(fmt::format("{} has come; it takes part once all ranks are started again", agent.host.name));
    return;
  }
  newcomers_[&agent] = Timer(loop_, start_timeout_, [this, one = &agent] {
    give_up_newcomer(*one, fmt::format("no sign of running ranks from {}", one->host.name));
  });
  places_.come(agent.host);
  take_newcomer(agent);
}

void ElasticMembers::drop_newcomers() {
  for (const auto& [agent, limit] : std::exchange(newcomers_, {})) {
    agent->all_gone = true;
    AgentPool::kill(*agent);
  }
}

void ElasticMembers::drain_unlisted() {
  std::erase_if(unspared_, [this](const std::string& name) { return places_.lists(name); });
  for (const int host : elastic_.youngest_hosts_first()) {
    const auto& agent = *std::ranges::find(agents_.members(), host, [](const auto& one) { return one->host.index; });
    const std::string& name = agent->host.name;
    const std::vector<int> workers = members_on(*agent);
    if (places_.lists(name) || workers.empty() || !events_.running()) continue;
    const bool one = workers.size() == 1;
    if (const auto spare = elastic_.can_spare(static_cast<int>(workers.size())); !spare) {
      if (unspared_.insert(name).second)
        say(fmt::format("host {} is listed no more, and its worker{} {} {}: {}", name, one ? "" : "s",
                        to_ranges(workers), one ? "stays" : "stay", spare.error().what()));
      continue;
    }
    leave({agent.get()}, fmt::format("host {} is listed no more", name));
  }
}

// ---- leaving as planned ----

std::vector<int> ElasticMembers::members_on(const AgentHandle& agent) const {
  std::vector<int> workers = processes_on(setup_.plan, agent.host.index);
  std::erase_if(workers, [this](int worker) {
    return members_.has_ended(worker) || !rendezvous::place_of(elastic_.current(), worker);
  });
  return workers;
}

// They end by themselves, when they find that they are no members of the next world.
void ElasticMembers::leave(const std::set<AgentHandle*>& agents, const std::string& why) {
  std::vector<int> leavers;
  for (AgentHandle* const agent : agents) {
    const std::vector<int> workers = members_on(*agent);
    leavers.insert(leavers.end(), workers.begin(), workers.end());
    leaving_[agent];
    for (const int process : processes_on(setup_.plan, agent->host.index)) {
      health_.left(process);
      arrivals_.erase(process);
    }
    if (workers.empty()) end_leavers(*agent, SIGTERM);
  }
  if (leavers.empty()) return;
  std::ranges::sort(leavers);
  const bool one = leavers.size() == 1;
  const std::string cause =
      fmt::format("worker{} {} {}: {}", one ? "" : "s", to_ranges(leavers), one ? "leaves" : "leave", why);
  (void)leave(leavers, cause);
}

// ---- orders ----

Result<std::string> ElasticMembers::obey(const ControlOrder& order) {
  if (elastic_.over()) return fail(ErrorCode::Unavailable, "the job is about to end");
  return order.kind == ControlOrder::Kind::Add ? add_host(order.host) : take_away(order);
}

Result<std::string> ElasticMembers::add_host(const std::string& typed) {
  if (comes_by_itself(setup_.plan.method))
    return fail(ErrorCode::Unavailable, "the hosts of this job come by themselves, by a command that is started there");
  const auto hosts = listed_hosts(spec_, setup_.plan.method, typed + "\n");
  if (!hosts) return tl::unexpected(hosts.error());
  const PlannedHost& host = hosts->front();
  if (!host.local && !goes_elsewhere(setup_.plan))
    return fail(ErrorCode::Unavailable,
                "the job was started for this host alone and listens to no other: -H or --host-discovery-script is "
                "for jobs of several");
  places_.add(host);
  const auto under_way = [this] {
    int workers = static_cast<int>(ordered_.size());
    for (const auto& [agent, limit] : newcomers_) workers += agent->host.slots;
    return workers;
  };
  const int before = under_way();
  fill();
  const int started = under_way() - before;
  say(fmt::format("host {} is added (cohort ctl)", host.name));
  if (started > 0) return fmt::format("{} worker{} started on {}", started, started == 1 ? " is" : "s are", host.name);
  const bool full = free_slots(host).empty();
  return fmt::format("{} is noted; {}", host.name,
                     full ? fmt::format("there is no place for more than its {} now", host.slots)
                          : "the job has as many workers as it may have now");
}

Result<std::string> ElasticMembers::take_away(const ControlOrder& order) {
  std::set<AgentHandle*> going;
  std::set<std::string> others;
  int workers = 0;
  for (const auto& agent : agents_.members()) {
    if (agent->all_gone) continue;
    if (agent->host.name != order.host) {
      others.insert(agent->host.name);
      continue;
    }
    going.insert(agent.get());
    workers += static_cast<int>(members_on(*agent).size());
  }
  if (going.empty())
    return fail(ErrorCode::Unavailable, "nothing of the job runs on {}; it runs on {}", order.host,
                fmt::join(others, ", "));
  if (workers > 0) {
    if (auto spare = elastic_.can_spare(workers); !spare) return tl::unexpected(spare.error());
  }
  const bool kill = order.kind == ControlOrder::Kind::Remove;
  places_.take_away(order.host);
  const auto epoch = elastic_.current().epoch;
  for (AgentHandle* const agent : std::set(going)) {
    if (!newcomers_.contains(agent)) continue;
    give_up_newcomer(*agent, fmt::format("host {} is taken away (cohort ctl)", order.host));
    going.erase(agent);
  }
  leave(going, fmt::format("host {} is {} (cohort ctl)", order.host, kill ? "removed" : "drained"));
  for (AgentHandle* const agent : going) {
    if (kill) end_leavers(*agent, SIGKILL);
  }
  const rendezvous::Membership& now = elastic_.current();
  if (now.epoch == epoch) return fmt::format("{} has no members; what runs there is ended", order.host);
  return fmt::format("{}; epoch {} goes on with {}", now.cause, now.epoch, elastic_.sizes());
}

void ElasticMembers::end_leavers(AgentHandle& agent, int signal) {
  if (agent.all_gone || agent.channel == nullptr) return;
  const auto grace = static_cast<std::uint32_t>(spec_.grace.count());
  agent.channel->send(StopWorkers{signal, grace, grace, Role::Worker});
}

void ElasticMembers::on_all_gone(AgentHandle& agent) {
  leaving_.erase(&agent);
  for (const int process : processes_on(setup_.plan, agent.host.index)) {  // (ordered too late)
    if (ordered_.contains(process)) end_lost(process);
  }
  if (noticed_.contains(&agent)) agent.channel->send(Finish{});
}

bool ElasticMembers::take_notice(AgentHandle& agent, int signal) {
  if (!may_change() || signal != SIGTERM) return false;
  if (noticed_.insert(&agent).second && !notice_)
    notice_ = Timer(loop_, kNoticeTime, [this, signal] { act_on_notices(signal); });
  return true;
}

void ElasticMembers::act_on_notices(int signal) {
  notice_ = Timer();
  if (!may_change()) return;
  std::set<AgentHandle*> going;
  std::string names;
  int workers = 0;
  for (AgentHandle* const agent : noticed_) {
    if (agent->all_gone || leaving_.contains(agent)) continue;
    going.insert(agent);
    names += (names.empty() ? "" : ", ") + agent->host.name;
    workers += static_cast<int>(members_on(*agent).size());
  }
  if (going.empty()) return;
  if (workers > 0 && !elastic_.can_lose(workers)) return events_.on_told(**going.begin(), signal);
  for (AgentHandle* const agent : going) {
    places_.bar(agent->host.name);
    // (SIGTERM would have ranks that are still in a world with the others save and end, all of them.)
    leaving_[agent].limit = Timer(loop_, spec_.preempt_grace, [this, agent] { end_leavers(*agent, SIGKILL); });
  }
  leave(going, fmt::format("the agent{} of {} {} told to end by {}", going.size() == 1 ? "" : "s", names,
                           going.size() == 1 ? "was" : "were", sys::signal_name(signal)));
}

}  // namespace cohort::launch
