#include "launch/membership/membership.h"

#include <cohort/exit_status.h>

#include "base/parse.h"
#include "base/signals.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <iterator>
#include <utility>

namespace cohort::launch {
namespace {

using std::chrono::seconds;

/// A batch system tells all processes of a job to end at about the same moment.
constexpr auto kNoticeTime = std::chrono::milliseconds(200);
/// Without a script, hosts are looked through for free slots so often.
constexpr auto kFillEvery = seconds(1);
/// Agents report each 0.4 s what their workers say of themselves.
constexpr auto kHearTime = seconds(2);

constexpr const char* kNoState = "no worker that is left has the training's state";

std::string plural(std::size_t count) { return count == 1 ? "" : "s"; }

/// "workers 1-2".
std::string names_of_workers(const std::vector<int>& workers) {
  return fmt::format("worker{} {}", plural(workers.size()), to_ranges(workers));
}

/// " (ranks 0-2 are workers 0,2-3)"; empty where the numbers are the same.
std::string numbering_of(const rendezvous::Membership& now) {
  std::vector<int> workers;
  bool same = true;
  for (const rendezvous::Member& member : now.members) {
    same = same && member.worker == static_cast<int>(workers.size());
    workers.push_back(member.worker);
  }
  if (same) return {};
  if (workers.size() == 1) return fmt::format(" (rank 0 is worker {})", workers.front());
  return fmt::format(" (ranks 0-{} are workers {})", workers.size() - 1, to_ranges(workers));
}

/// "worker 3 (h2) was killed by SIGKILL".
std::string how_it_left(const KnownWorker& worker, const event::Ended& ended) {
  const std::string who = fmt::format("worker {} ({})", worker.number, worker.host);
  if (ended.how == event::Ended::How::Notice) return who + " left on notice";
  if (ended.how == event::Ended::How::Killed && worker.stopped)
    return fmt::format("{} was stopped for {} s and is killed", who, worker.stopped->count());
  return fmt::format("{} {} {}", who, ended.how == event::Ended::How::Killed ? "was" : "ended with", ended.status);
}

}  // namespace

Membership::Membership(Options options, const Plan& plan, Past past)
    : options_(std::move(options)),
      first_epoch_(past.next_epoch),
      hosts_(options_.cooldown, std::move(past.barred)),
      roster_(past.next_epoch) {
  for (const PlannedHost& host : plan.hosts) {
    agents_[host.index].name = host.name;
    next_agent_ = std::max(next_agent_, host.index + 1);
    PlannedHost listed = host;
    listed.slots = host.ranks;
    hosts_.come(listed);
    for (int i = 0; i < host.ranks; ++i) {
      const int number = host.first_rank + i;
      const bool first = number < plan.world_size - plan.spares;
      roster_.add({.number = number,
                   .agent = host.index,
                   .host = host.name,
                   .slot = host.first_local + i,
                   .stage = KnownWorker::Stage::Running,
                   .first = first,
                   .counted = first});
    }
  }
  next_worker_ = plan.world_size;
  roster_.begin();
}

Membership::Answer Membership::on(const Event& event, Time now) {
  now_ = now;
  taken_ = true;
  reply_ = {};
  std::visit([this](const auto& one) { take(one); }, event);
  drop_those_nobody_waits_for();
  if (verdict_) actions_.push_back(*std::exchange(verdict_, {}));
  return {taken_, std::move(reply_), std::exchange(actions_, {})};
}

std::optional<Membership::Time> Membership::next_look() const {
  std::optional<Time> next;
  const auto consider = [&next](const std::optional<Time>& time) {
    if (time && (!next || *time < *next)) next = time;
  };
  for (const auto& time : {wait_limit_, doubt_limit_, fill_at_, notices_at_}) consider(time);
  for (const auto& [index, agent] : agents_) consider(agent.limit);
  for (const Leaving& leaving : leaving_) consider(leaving.limit);
  for (const Held& held : held_) consider(held.limit);
  return next;
}

bool Membership::is_newcomer(int agent) const {
  const auto found = agents_.find(agent);
  return found != agents_.end() && found->second.newcomer();
}

bool Membership::awaits(int worker) const {
  const auto found = roster_.all().find(worker);
  return found != roster_.all().end() && found->second.stage == KnownWorker::Stage::Ordered;
}

// ---- events ----

void Membership::take(const event::Ordered&) { ordered_ = true; }

void Membership::take(const event::Running& event) {
  running_ = true;
  next_agent_ = event.agents;
  for (const PlannedHost& host : event.usable) agents_[host.index] = {host.name, host.slots, Agent::Stage::Idle};
  if (!options_.asks_script) fill_at_ = now_ + kFillEvery;
  let_ended_leave();
}

void Membership::take(const event::Stopping&) {
  over_ = true;
  wait_limit_ = doubt_limit_ = fill_at_ = notices_at_ = {};
  leaving_.clear();
  held_.clear();
  for (auto& [index, agent] : agents_) {
    agent.limit.reset();
    if (agent.newcomer()) agent.stage = Agent::Stage::Gone;
  }
}

void Membership::take(const event::Tick&) {
  const auto due = [this](std::optional<Time>& time) { return time && *time <= now_ && (time.reset(), true); };
  if (due(notices_at_)) act_on_notices();
  if (due(fill_at_)) {
    fill_at_ = now_ + kFillEvery;
    fill();
  }
  for (auto& [index, agent] : agents_) {
    if (due(agent.limit))
      give_up(index,
              fmt::format("no sign of running ranks from {} after {:.0f} s", agent.name,
                          std::chrono::duration<double>(options_.start_timeout).count()),
              true);
  }
  for (Leaving& leaving : leaving_) {
    if (due(leaving.limit)) end_leavers(leaving);
  }
  for (std::size_t i = 0; i < held_.size() && may_change(); ++i) {
    if (due(held_[i].limit)) end_as_told(held_[i].agent, held_[i].signal);
  }
  if (doubt_limit_ && *doubt_limit_ <= now_) lose_training(doubt_cause_);
  if (due(wait_limit_) && !over_) {
    end_job(kRequeueStatus,
            fmt::format("no hosts have come within {} s (--elastic-timeout); exit status {} asks for the job to be "
                        "started again",
                        options_.timeout.count(), kRequeueStatus),
            SIGTERM);
  }
}

void Membership::take(const event::Reported& event) {
  bool news = false, newcomers = false;
  for (const event::Reported::One& one : event.workers) {
    KnownWorker* const worker = roster_.find(one.worker);
    if (worker == nullptr || worker->ended()) continue;
    worker->waits = one.waits;
    worker->to_be_member = worker->to_be_member || one.to_be_member;
    news = news || one.formed_epoch > worker->formed_epoch || (one.has_state && !worker->has_state);
    roster_.report(*worker, one.formed_epoch, one.has_state);
    newcomers = newcomers || worker->newcomer();
  }
  if (!may_change()) return;
  if (news) {
    look_for_formed();
    settle_doubt();
    look_for_held();
  }
  if (newcomers) take_newcomers();
  look_for_waiting();
}

void Membership::take(const event::Ended& event) {
  KnownWorker* const worker = roster_.find(event.worker);
  if (worker == nullptr || worker->ended()) return;
  worker->stage = KnownWorker::Stage::Ended;
  roster_.report(*worker, event.formed_epoch, event.has_state);
  ended_.push_back(event);
  // Those that have the training decide how a job ends: who has only come, or was to leave, may not be able to save.
  const bool decides = roster_.is_member(worker->number) && roster_.knows(*worker);
  if (over_ && running_ && !decides && event.how != event::Ended::How::Done) act(action::Excuse{worker->number});
  std::erase_if(leaving_, [this](const Leaving& leaving) {
    return !leaving.all && std::ranges::all_of(leaving.workers, [this](int one) { return roster_.find(one)->ended(); });
  });
  let_ended_leave();
  look_for_members();
}

void Membership::take(const event::StoppedTooLong& event) {
  KnownWorker* const worker = roster_.find(event.worker);
  taken_ = worker != nullptr && !worker->ended() && may_change() && !begins_anew();
  if (!taken_ || worker->stopped) return;
  std::vector<int> dying{worker->number};
  for (const KnownWorker* const one : roster_.counted()) {
    if (one->stopped && !one->ended() && roster_.is_member(one->number)) dying.push_back(one->number);
  }
  taken_ = !worker->counted || !roster_.is_member(worker->number) || can_lose(dying);
  if (!taken_) return;
  worker->stopped = event.since;
  act(action::Kill{worker->agent, worker->number});
}

void Membership::take(const event::StartedOne& event) {
  KnownWorker* const worker = roster_.find(event.worker);
  if (worker == nullptr || worker->stage != KnownWorker::Stage::Ordered) return;
  if (event.why_not.empty()) {
    worker->stage = KnownWorker::Stage::Running;
    return;
  }
  hosts_.note_failure(worker->host, now_);
  say(fmt::format("worker {} cannot be started on {}: {}", worker->number, worker->host, event.why_not));
  lose(*worker);
}

void Membership::take(const event::AgentLost& event) {
  const auto found = agents_.find(event.agent);
  if (found == agents_.end()) return void(taken_ = false);
  Agent& agent = found->second;
  if (agent.stage == Agent::Stage::Idle) agent.stage = Agent::Stage::Gone;
  // (As ranks start, none may have failed before: what that means is known when all run.)
  const bool starts = ordered_ && !running_ && !over_ && ended_.empty();
  taken_ = (may_change() || starts) && agent.has_ranks();
  if (!taken_) return;
  if (agent.newcomer()) return give_up(event.agent, fmt::format("{} is lost ({})", agent.name, event.why), true);
  const std::vector<int> lost = workers_on(event.agent, false);
  std::vector<int> members;
  std::ranges::copy_if(lost, std::back_inserter(members), [this](int worker) { return roster_.is_member(worker); });
  for (const int number : lost) roster_.find(number)->stage = KnownWorker::Stage::Ended;
  Course course = Course::GoesOn;
  if (lost.empty()) {
    say(fmt::format("{} is lost ({}), where nothing ran any more", agent.name, event.why));
  } else {
    const bool one = lost.size() == 1;
    const std::string cause = fmt::format("{} {} lost with {} host {} ({})", names_of_workers(lost), one ? "is" : "are",
                                          one ? "its" : "their", agent.name, event.why);
    if (members.empty()) {
      const bool left = std::ranges::all_of(lost, [this](int worker) { return roster_.find(worker)->leaving; });
      say(left ? cause : cause + " before it was a member; the job goes on without");
    } else if (begins_anew()) {
      say(cause);
      course = Course::Fails;
    } else {
      own_errors_ = false;
      fresh_failures_.insert(members.begin(), members.end());
      course = leave(lost, cause);
      taken_ = course != Course::Fails || options_.restarts;
      if (!taken_) return;
    }
  }
  if (!agent.leaving) hosts_.note_failure(agent.name, now_);
  drop(event.agent, lost, course == Course::Fails);
}

void Membership::take(const event::AgentFailed& event) {
  taken_ = is_newcomer(event.agent);
  if (taken_) give_up(event.agent, event.why, true);
}

void Membership::take(const event::AgentJoined& event) {
  taken_ = is_newcomer(event.agent);
  if (taken_) start_ranks(event.agent);
}

void Membership::take(const event::AgentCame& event) {
  const int index = event.host.index;
  next_agent_ = std::max(next_agent_, index + 1);
  if (begins_anew()) {
    agents_[index] = {event.host.name, event.host.slots, Agent::Stage::Idle};
    act(action::Hold{index});
    return say(fmt::format("{} has come; it takes part once all ranks are started again", event.host.name));
  }
  agents_[index] = {event.host.name, event.host.slots, Agent::Stage::Coming, now_ + options_.start_timeout};
  hosts_.come(event.host);
  start_ranks(index);
}

void Membership::take(const event::AgentStarted& event) {
  taken_ = is_newcomer(event.agent);
  if (!taken_) return;
  agents_[event.agent].stage = Agent::Stage::Running;
  agents_[event.agent].limit.reset();
  for (const int number : workers_on(event.agent, false)) roster_.find(number)->stage = KnownWorker::Stage::Running;
}

void Membership::take(const event::AgentEmpty& event) {
  const auto found = agents_.find(event.agent);
  if (found == agents_.end()) return;
  for (const int number : workers_on(event.agent, false)) {  // (ordered too late)
    if (awaits(number)) lose(*roster_.find(number));
  }
  std::erase_if(leaving_, [&event](const Leaving& leaving) { return leaving.agent == event.agent; });
  Agent& agent = found->second;
  agent.leaving = false;
  agent.limit.reset();
  agent.stage = agent.noticed ? Agent::Stage::Gone : Agent::Stage::Idle;
  if (agent.noticed) act(action::Finish{event.agent});
}

void Membership::take(const event::AgentNoticed& event) {
  const auto found = agents_.find(event.agent);
  taken_ = may_change() && event.signal == SIGTERM && found != agents_.end();
  if (!taken_ || std::exchange(found->second.noticed, true) || notices_at_) return;
  notices_at_ = now_ + kNoticeTime;
}

void Membership::take(const event::Listed& event) {
  if (!may_change()) return;
  hosts_.list(event.hosts);
  drain_unlisted();
  fill();
}

void Membership::take(const event::Add& event) {
  if (!may_change()) return void(reply_ = fail(ErrorCode::Unavailable, "the job is about to end"));
  const PlannedHost& host = event.host;
  hosts_.add(host);
  std::erase_if(held_, [&host](const Held& held) { return held.host == host.name; });
  const int before = on_their_way();
  fill();
  const int started = on_their_way() - before;
  say(fmt::format("host {} is added (cohort ctl)", host.name));
  if (started > 0)
    reply_ = fmt::format("{} worker{} started on {}", started, started == 1 ? " is" : "s are", host.name);
  else if (free_slots(host).empty())
    reply_ = fmt::format("{} is noted; there is no place for more than its {} now", host.name, host.slots);
  else
    reply_ = fmt::format("{} is noted; the job has as many workers as it may have now", host.name);
}

void Membership::take(const event::TakeAway& event) {
  if (may_change())
    reply_ = take_away(event.host, event.kill);
  else
    reply_ = fail(ErrorCode::Unavailable, "the job is about to end");
}

// ---- what may be ----

bool Membership::changes_are_used_up() const {
  return options_.most_changes && changes() >= static_cast<std::uint64_t>(*options_.most_changes);
}

int Membership::room() const {
  if (over_ || finishing_ || changes_are_used_up()) return 0;
  return std::max(0, (options_.most > 0 ? options_.most : kMostProcesses) - roster_.size());
}

Result<void> Membership::can_spare(int workers) const {
  if (over_) return fail(ErrorCode::Unavailable, "the job is about to end");
  if (finishing_) return fail(ErrorCode::Unavailable, "ranks have done their part: the job is about to end");
  if (wait_limit_) return fail(ErrorCode::Unavailable, "the job has too few ranks, and waits for hosts");
  if (doubt_limit_) return fail(ErrorCode::Unavailable, "it is not known yet who has the training's state");
  if (changes_are_used_up())
    return fail(ErrorCode::Unavailable, "its members have changed {} times (--reset-limit)", changes());
  if (roster_.size() - workers < options_.least)
    return fail(ErrorCode::Unavailable, "fewer than --min-np {} would be left", options_.least);
  return {};
}

bool Membership::can_lose(const std::vector<int>& workers) const {
  const int left = roster_.size() - static_cast<int>(workers.size());
  if (over_ || finishing_ || doubt_limit_ || changes_are_used_up() || left <= 0) return false;
  return (left >= options_.least || options_.others_may_come) && !are_last_with_state(workers);
}

bool Membership::are_last_with_state(const std::vector<int>& workers) const {
  return roster_.others_know({}) && !roster_.others_know(workers);
}

// ---- who goes on ----

Membership::Course Membership::leave(const std::vector<int>& workers, const std::string& cause) {
  bool any = false;
  for (const int number : workers) any = std::exchange(roster_.find(number)->counted, false) || any;
  if (over_) return Course::GoesOn;
  if (any) return go_on(cause);
  if (wait_limit_) say(cause + "; waiting for more hosts");
  return Course::GoesOn;
}

Membership::Course Membership::go_on(std::string cause) {
  if (!roster_.others_know({})) {
    const std::vector<const KnownWorker*> left = roster_.counted();
    const bool any = std::ranges::any_of(roster_.all(), [](const auto& one) { return one.second.newcomer(); });
    // (Where somebody has ended its part, the training is no more lost than the others' failure says.)
    if (!roster_.begun() || finishing_ || (left.empty() && !any))
      return end(cause, left.empty() ? "no worker is left" : kNoState);
    // One that has formed the world may have been given the state since its last report.
    const bool perhaps =
        std::ranges::any_of(left, [this](const KnownWorker* one) { return roster_.is_member(one->number); });
    if (!perhaps) return lose_training(doubt_limit_ ? doubt_cause_ + "; " + cause : cause);
    doubt_cause_ = doubt_limit_ ? doubt_cause_ + "; " + cause : cause;
    if (!doubt_limit_) doubt_limit_ = now_ + kHearTime;
    return Course::GoesOn;
  }
  std::vector<int> ready;
  for (const auto& [number, worker] : roster_.all()) {
    if (worker.newcomer() && worker.to_be_member) ready.push_back(number);
  }
  ready.resize(std::min(ready.size(), static_cast<std::size_t>(room())));
  if (!ready.empty() && roster_.size() + static_cast<int>(ready.size()) >= options_.least) {
    for (const int number : ready) roster_.find(number)->counted = true;
    cause +=
        fmt::format("; {} {}", names_of_workers(ready), ready.size() == 1 ? "takes its place" : "take their place");
  }
  const int size = roster_.size();
  if (size >= options_.least) return announce(cause);
  const std::string few =
      fmt::format("{} worker{} left, and {} are wanted", size, size == 1 ? " is" : "s are", options_.least);
  if (changes_are_used_up()) return end(cause, fmt::format("{}; --reset-limit {} lets no others come", few, changes()));
  if (!options_.others_may_come || finishing_) return end(cause, few);
  if (wait_limit_) {
    say(cause + "; waiting for more hosts");
  } else {
    say(fmt::format("{}; {}: waiting up to {} s for hosts", cause, few, options_.timeout.count()));
    wait_limit_ = now_ + options_.timeout;
  }
  return Course::GoesOn;
}

Membership::Course Membership::announce(const std::string& cause) {
  if (changes_are_used_up())
    return end(cause,
               fmt::format("its members have changed {} time{} (--reset-limit)", changes(), changes() == 1 ? "" : "s"));
  roster_.begin_epoch(cause);
  wait_limit_.reset();
  announced_at_ = now_;
  const rendezvous::Membership& now = roster_.current();
  act(action::Announce{
      now, fmt::format("{}; epoch {} goes on with {}{}", cause, now.epoch, roster_.sizes(), numbering_of(now))});
  return Course::GoesOn;
}

Membership::Course Membership::end(const std::string& cause, const std::string& why) {
  over_ = true;
  wait_limit_ = doubt_limit_ = {};
  say(fmt::format("{}; the job cannot go on: {}", cause, why));
  if (fresh_failures_.empty()) {  // no failure is to blame
    end_job(kRequeueStatus, fmt::format("{}; exit status {} asks for the job to be started again", why, kRequeueStatus),
            SIGTERM);
  }
  for (const int worker : std::exchange(fresh_failures_, {})) act(action::Excuse{worker, false});
  return Course::Fails;
}

// Fresh ranks have nothing to save, and nothing of theirs is to stand over a checkpoint.
Membership::Course Membership::lose_training(const std::string& cause) {
  const std::string lost = cause;  // (it may be the doubt's)
  if (!fresh_failures_.empty() && (options_.restarts || own_errors_)) return end(lost, kNoState);
  fresh_failures_.clear();
  end(lost, kNoState);
  end_job(kRequeueStatus,
          fmt::format("{}: exit status {} asks for the job to be started again, from its last checkpoint (with "
                      "--max-restarts that is done here)",
                      kNoState, kRequeueStatus),
          SIGKILL);
  return Course::Ends;
}

void Membership::end_job(int status, std::string why, int signal) {
  over_ = true;
  wait_limit_ = doubt_limit_ = {};
  verdict_ = action::EndJob{status, std::move(why), signal};
}

void Membership::end_as_told(int agent, int signal) {
  over_ = true;
  wait_limit_ = doubt_limit_ = {};
  verdict_ = action::EndAsTold{agent, signal};
}

void Membership::let_ended_leave() {
  if (!may_change()) return;
  std::vector<int> workers, on_notice;
  std::string cause;
  const bool anew = begins_anew();
  bool breaks_down = false;  // all begin anew
  for (const event::Ended& ended : std::exchange(ended_, {})) {
    KnownWorker& worker = *roster_.find(ended.worker);
    const bool member = worker.counted && roster_.is_member(worker.number);
    const bool notice = ended.how == event::Ended::How::Notice;
    if (ended.how == event::Ended::How::Done || ended.how == event::Ended::How::Asked || (notice && finishing_)) {
      if (!member && ended.how != event::Ended::How::Done) act(action::Excuse{worker.number});
      finish(worker);
      continue;
    }
    if (anew && !notice) {
      worker.counted = false;
      breaks_down = true;
      act(action::Excuse{worker.number, false});
      continue;
    }
    act(action::Excuse{worker.number});
    act(action::Leaves{worker.number});
    if (!member) {
      const bool leaver = !std::exchange(worker.counted, false) && worker.leaving;
      if (leaver) continue;  // it was to leave: it ends by itself
      if (notice)
        hosts_.hold(worker.host, worker.slot, now_);
      else
        hosts_.note_failure(worker.host, now_);
      say(how_it_left(worker, ended) + " before it was a member; the job goes on without it");
      continue;
    }
    cause += (cause.empty() ? "" : "; ") + how_it_left(worker, ended);
    workers.push_back(worker.number);
    if (notice) {
      on_notice.push_back(worker.number);
      // Its slot goes on as little as that of one that has failed.
      hosts_.hold(worker.host, worker.slot, now_);
    } else {
      hosts_.note_failure(worker.host, now_);
      fresh_failures_.insert(worker.number);
      own_errors_ = own_errors_ && ended.how == event::Ended::How::Failed;
    }
  }
  if (breaks_down) {
    for (const int worker : workers) roster_.find(worker)->counted = false;
    return;
  }
  if (workers.empty() || leave(workers, cause) != Course::Fails) return;
  for (const int worker : on_notice) act(action::Excuse{worker, false});
  const bool others = std::ranges::any_of(roster_.all(), [](const auto& one) { return !one.second.ended(); });
  if (on_notice.size() == workers.size() && others) {
    end_job(kRequeueStatus,
            fmt::format("too many workers have left on notice; exit status {} asks for the job to be started again",
                        kRequeueStatus),
            SIGTERM);
  }
}

void Membership::finish(KnownWorker& worker) {
  finishing_ = (std::exchange(worker.counted, false) && roster_.is_member(worker.number)) || finishing_;
  for (auto& [number, one] : roster_.all()) one.waits = false;
}

void Membership::look_for_members() {
  const auto runs = [this](int worker) { return !roster_.find(worker)->ended(); };
  if (!may_change() || workers_ended_ || wait_limit_ || doubt_limit_ ||
      std::ranges::none_of(roster_.all(), [](const auto& one) { return !one.second.ended(); }) ||
      std::ranges::any_of(current().members, runs, &rendezvous::Member::worker))
    return;
  workers_ended_ = true;
  act(action::EndWorkers{});
}

// Once somebody's part is done: whether all who run wait for a world that is never formed. Where nobody has trained, a
// rank that ended well may be why the others wait: that is a failure, which health names.
void Membership::look_for_waiting() {
  if (!finishing_ || workers_ended_ || !may_change() || doubt_limit_ || !roster_.formed()) return;
  bool any = false;
  for (const auto& [number, worker] : roster_.all()) {
    if (worker.ended()) continue;
    if (!worker.waits) return;
    any = true;
  }
  for (auto& [number, worker] : roster_.all()) worker.waits = false;
  const auto counted = [this](int worker) { return roster_.find(worker)->counted; };
  if (any && !roster_.others_know({})) {
    say("the training is over; workers that have only come are ended");
    workers_ended_ = true;
    act(action::EndWorkers{});
  } else if (roster_.size() > 0 && !std::ranges::all_of(current().members, counted, &rendezvous::Member::worker)) {
    announce("others have done their part");
  }
}

void Membership::look_for_formed() {
  if (wait_limit_ || doubt_limit_) return;
  const auto has_formed = [this](int worker) {
    return roster_.find(worker)->formed_epoch >= static_cast<std::int64_t>(current().epoch);
  };
  if (std::ranges::none_of(current().members, has_formed, &rendezvous::Member::worker)) return;
  // Those that go on have formed a world.
  own_errors_ = true;
  if (!std::exchange(fresh_failures_, {}).empty()) act(action::FailureOver{});
  for (Leaving& leaving : leaving_) {
    if (leaving.epoch > current().epoch || std::exchange(leaving.others_went_on, true)) continue;
    leaving.limit = now_ + options_.grace;
    leaving.signal = SIGTERM;
  }
  if (!announced_at_ || !std::ranges::all_of(current().members, has_formed, &rendezvous::Member::worker)) return;
  act(action::Formed{std::chrono::duration_cast<std::chrono::milliseconds>(now_ - *announced_at_)});
  announced_at_.reset();
}

void Membership::settle_doubt() {
  if (!doubt_limit_ || !roster_.others_know({})) return;
  doubt_limit_.reset();
  go_on(std::exchange(doubt_cause_, {}));
}

// ---- newcomers ----

void Membership::fill() {
  if (!may_change() || finishing_ || doubt_limit_) return;
  int room = this->room() + options_.spares - on_their_way();
  for (const auto& [number, worker] : roster_.all()) room -= worker.newcomer() ? 1 : 0;
  for (const PlannedHost& host : hosts_.listed()) {
    if (room <= 0) return;
    if (!hosts_.may_use(host.name, now_)) continue;
    std::vector<int> free = free_slots(host);
    free.resize(std::min(free.size(), static_cast<std::size_t>(room)));
    if (!free.empty()) room -= bring(host, free);
  }
}

int Membership::on_their_way() const {
  auto workers = std::ranges::count_if(roster_.all(),
                                       [](const auto& one) { return one.second.stage == KnownWorker::Stage::Ordered; });
  for (const auto& [index, agent] : agents_) workers += agent.stage == Agent::Stage::Coming ? agent.slots : 0;
  return static_cast<int>(workers);
}

std::vector<int> Membership::free_slots(const PlannedHost& host) const {
  if (const int latest = latest_agent(host.name); latest >= 0) {
    if (agents_.at(latest).newcomer() || agents_.at(latest).leaving) return {};
  }
  std::set<int> taken;
  for (const auto& [number, worker] : roster_.all()) {
    if (!worker.ended() && worker.host == host.name) taken.insert(worker.slot);
  }
  const auto most = std::max(0, host.slots - static_cast<int>(taken.size()));
  std::vector<int> free;
  for (int slot = 0; slot < host.slots && static_cast<int>(free.size()) < most; ++slot) {
    if (!taken.contains(slot) && !hosts_.is_held(host.name, slot, now_)) free.push_back(slot);
  }
  return free;
}

int Membership::bring(const PlannedHost& host, const std::vector<int>& slots) {
  const int count = static_cast<int>(slots.size());
  const int latest = latest_agent(host.name);
  if (latest >= 0 && agents_[latest].stage == Agent::Stage::Running) {
    for (const int slot : slots) {
      roster_.add({.number = next_worker_, .agent = latest, .host = host.name, .slot = slot});
      act(action::StartOne{latest, next_worker_++, slot});
    }
  } else if (latest >= 0 && agents_[latest].stage == Agent::Stage::Idle) {
    agents_[latest] = {host.name, count, Agent::Stage::Coming, now_ + options_.start_timeout};
    start_ranks(latest);
  } else if (!options_.come_by_themselves) {
    agents_[next_agent_++] = {host.name, count, Agent::Stage::Coming, now_ + options_.start_timeout};
    PlannedHost wanted = host;
    wanted.slots = count;
    act(action::AddAgent{std::move(wanted)});
  } else {
    return 0;
  }
  return count;
}

void Membership::start_ranks(int index) {
  Agent& agent = agents_[index];
  if (!may_change() || finishing_ || room() + options_.spares < agent.slots) {
    agent.limit.reset();
    agent.stage = Agent::Stage::Gone;  // the job is about to end, or has as many as it may
    return act(action::Finish{index});
  }
  agent.stage = Agent::Stage::Starting;
  act(action::StartRanks{index, agent.slots, next_worker_});
  for (int slot = 0; slot < agent.slots; ++slot)
    roster_.add({.number = next_worker_++, .agent = index, .host = agent.name, .slot = slot});
}

void Membership::give_up(int index, const std::string& why, bool failed) {
  const std::string& name = agents_[index].name;
  if (failed) hosts_.note_failure(name, now_);
  say(fmt::format("{}; the job goes on without {}", why, name));
  drop(index, workers_on(index, false), false);
}

void Membership::drop(int index, const std::vector<int>& workers, bool failed) {
  for (const int number : workers) {
    roster_.find(number)->stage = KnownWorker::Stage::Ended;
    roster_.find(number)->counted = false;
  }
  std::erase_if(leaving_, [index](const Leaving& leaving) { return leaving.agent == index; });
  agents_[index].stage = Agent::Stage::Gone;
  agents_[index].limit.reset();
  act(action::Drop{index, workers, failed});
}

// Once no worker runs any more.
void Membership::drop_those_nobody_waits_for() {
  if (!running_ || std::ranges::any_of(roster_.all(), [](const auto& one) { return !one.second.ended(); })) return;
  for (const auto& [index, agent] : agents_) {
    if (agent.stage == Agent::Stage::Coming) drop(index, {}, false);
  }
}

void Membership::lose(KnownWorker& worker) {
  worker.stage = KnownWorker::Stage::Ended;
  worker.counted = false;
  act(action::Lost{worker.number});
}

// All that a host has, at once.
void Membership::take_newcomers() {
  std::map<int, std::vector<int>> by_agent;
  std::set<int> late;
  for (const auto& [number, worker] : roster_.all()) {
    if (!worker.newcomer()) continue;
    by_agent[worker.agent].push_back(number);
    if (!worker.to_be_member) late.insert(worker.agent);
  }
  for (auto& [index, workers] : by_agent) {
    if (late.contains(index) || !may_change() || doubt_limit_) continue;
    workers.resize(std::min(workers.size(), static_cast<std::size_t>(room())));
    if (workers.empty()) continue;
    for (const int number : workers) roster_.find(number)->counted = true;
    const std::string& name = agents_[index].name;
    const bool known = std::ranges::find(current().members, name, &rendezvous::Member::host) != current().members.end();
    const std::string cause =
        known ? fmt::format("{} {} come on {}", names_of_workers(workers), workers.size() == 1 ? "has" : "have", name)
              : fmt::format("host {} has come with {}", name, names_of_workers(workers));
    if (roster_.size() >= options_.least)
      announce(cause);
    else
      say(cause + "; waiting for more hosts");
  }
}

// ---- leaving as planned ----

// They end by themselves, when they find that they are no members of the next world.
void Membership::let_go(const std::vector<int>& agents, const std::string& why, std::optional<Time> limit) {
  std::vector<int> leavers;
  for (const int index : agents) {
    const std::vector<int> counted = workers_on(index, true);
    leavers.insert(leavers.end(), counted.begin(), counted.end());
    agents_[index].leaving = true;
    mark_leaving(workers_on(index, false), index, true, limit);
    if (std::ranges::none_of(counted, [this](int worker) { return roster_.is_member(worker); }))
      act(action::StopRanks{index, SIGTERM});
  }
  if (leavers.empty()) return;
  std::ranges::sort(leavers);
  leave(leavers, fmt::format("{} {}: {}", names_of_workers(leavers), leavers.size() == 1 ? "leaves" : "leave", why));
}

void Membership::mark_leaving(const std::vector<int>& workers, int agent, bool all, std::optional<Time> limit) {
  for (const int number : workers) {
    roster_.find(number)->leaving = true;
    act(action::Leaves{number});
  }
  leaving_.push_back({workers, agent, all, current().epoch + 1, false, limit, SIGKILL});
}

void Membership::end_leavers(const Leaving& leaving) {
  if (leaving.all) {
    if (agents_[leaving.agent].has_ranks()) act(action::StopRanks{leaving.agent, leaving.signal});
    return;
  }
  for (const int number : leaving.workers) {
    if (!roster_.find(number)->ended()) act(action::Kill{leaving.agent, number});
  }
}

void Membership::drain_unlisted() {
  const auto wanted = [this](const std::string& host) { return static_cast<std::size_t>(hosts_.slots_of(host)); };
  const auto there = [this](int agent) {  // that do not leave yet
    std::vector<int> workers = workers_on(agent, false);
    std::erase_if(workers, [this](int worker) { return roster_.find(worker)->leaving; });
    return workers;
  };
  std::vector<int> order;
  for (const auto& [index, agent] : agents_) {
    if (agent.has_ranks() && !agent.leaving && workers_on(index, true).empty()) order.push_back(index);
  }
  const std::vector<int> with_members = roster_.youngest_agents_first();
  order.insert(order.end(), with_members.begin(), with_members.end());
  for (const int index : order) {
    const std::string name = agents_[index].name;
    const std::size_t slots = wanted(name);
    std::vector<int> workers = there(index);
    if (agents_[index].leaving || !may_change() || (slots > 0 && workers.size() <= slots)) {
      unspared_.erase(name);
      continue;
    }
    const std::string why = slots == 0 ? fmt::format("host {} is listed no more", name)
                                       : fmt::format("host {} is listed with {} slot{}", name, slots, plural(slots));
    if (agents_[index].newcomer()) {
      if (slots == 0) give_up(index, why, false);
      continue;
    }
    // (Those that are no members yet come first.)
    const auto fresh = [this](int worker) { return !roster_.find(worker)->counted; };
    workers = roster_.youngest_first(std::move(workers));
    std::ranges::stable_partition(workers, fresh);
    workers.resize(workers.size() - slots);
    std::vector<int> leavers;
    std::ranges::copy_if(workers, std::back_inserter(leavers), [&](int worker) { return !fresh(worker); });
    std::ranges::sort(leavers);
    if (leavers.empty() && slots == 0) say(why + "; what runs there is ended");
    if (!leavers.empty()) {
      const auto spare = can_spare(static_cast<int>(leavers.size()));
      const std::string stays = !spare                         ? spare.error().what()
                                : are_last_with_state(leavers) ? "no other has the training's state yet"
                                                               : std::string();
      if (!stays.empty()) {
        if (std::exchange(unspared_[name], stays) != stays)
          say(fmt::format("{}, and its {} {}: {}", why, names_of_workers(leavers),
                          leavers.size() == 1 ? "stays" : "stay", stays));
        continue;
      }
    }
    unspared_.erase(name);
    if (slots == 0)
      let_go({index}, why, {});
    else
      let_some_go(index, workers, leavers, why);
  }
}

void Membership::let_some_go(int index, const std::vector<int>& workers, const std::vector<int>& counted,
                             const std::string& why) {
  mark_leaving(workers, index, false, {});
  for (const int worker : workers) {  // nobody has to wait for those that have only come
    if (!roster_.find(worker)->counted) act(action::Kill{index, worker});
  }
  if (!counted.empty())
    leave(counted, fmt::format("{} {}: {}", names_of_workers(counted), counted.size() == 1 ? "leaves" : "leave", why));
}

Result<std::string> Membership::take_away(const std::string& host, bool kill) {
  std::vector<int> going;
  std::set<std::string> others;
  for (const auto& [index, agent] : agents_) {
    if (!agent.has_ranks()) continue;
    if (agent.name != host) {
      others.insert(agent.name);
      continue;
    }
    going.push_back(index);
  }
  const std::vector<int> workers = workers_of(host);
  if (going.empty())
    return fail(ErrorCode::Unavailable, "nothing of the job runs on {}; it runs on {}", host, fmt::join(others, ", "));
  const bool members = std::ranges::any_of(workers, [this](int worker) { return roster_.is_member(worker); });
  if (members) {
    if (auto spare = can_spare(static_cast<int>(workers.size())); !spare) return tl::unexpected(spare.error());
    if (are_last_with_state(workers)) {
      std::erase_if(held_, [&host](const Held& held) { return held.host == host; });
      held_.push_back({kill, host});
      const std::string text =
          fmt::format("no other worker has the training's state yet: host {} is {} once another has it", host,
                      kill ? "removed" : "drained");
      say(text);
      return text;
    }
  }
  hosts_.take_away(host);
  const auto epoch = current().epoch;
  for (const int index : going) {
    if (is_newcomer(index)) give_up(index, fmt::format("host {} is taken away (cohort ctl)", host), false);
  }
  std::erase_if(going, [this](int index) { return !agents_[index].has_ranks(); });
  let_go(going, fmt::format("host {} is {} (cohort ctl)", host, kill ? "removed" : "drained"), {});
  for (const int index : going) {
    if (kill) act(action::StopRanks{index, SIGKILL});
  }
  const rendezvous::Membership& now = current();
  if (now.epoch == epoch) return fmt::format("{} has no members; what runs there is ended", host);
  return fmt::format("{}; epoch {} goes on with {}", now.cause, now.epoch, roster_.sizes());
}

// Somebody else may have the training's state now.
void Membership::look_for_held() {
  if (options_.asks_script && !unspared_.empty()) drain_unlisted();
  for (const Held& held : std::vector<Held>(held_)) {
    if (held.host.empty()) {
      act_on_notices();
      continue;
    }
    const std::vector<int> workers = workers_of(held.host);
    if (are_last_with_state(workers)) continue;
    std::erase_if(held_, [&held](const Held& one) { return one.host == held.host; });
    if (workers.empty() || !may_change()) continue;
    if (const auto done = take_away(held.host, held.kill); !done)
      say(fmt::format("host {} stays: {}", held.host, done.error().what()));
  }
}

void Membership::act_on_notices() {
  if (!may_change()) return;
  std::vector<int> going, workers;
  std::string names;
  for (const auto& [index, agent] : agents_) {
    if (!agent.noticed || agent.leaving || !agent.has_ranks()) continue;
    going.push_back(index);
    names += (names.empty() ? "" : ", ") + agent.name;
    const std::vector<int> counted = workers_on(index, true);
    workers.insert(workers.end(), counted.begin(), counted.end());
  }
  const auto is_notice = [](const Held& held) { return held.host.empty(); };
  if (going.empty()) return void(std::erase_if(held_, is_notice));
  const std::string why = fmt::format("the agent{} of {} {} told to end by {}", plural(going.size()), names,
                                      going.size() == 1 ? "was" : "were", sys::signal_name(SIGTERM));
  if (!workers.empty() && !can_lose(workers)) {
    // Another may have the state soon; ranks that are told at last have half of the time to save it.
    const bool soon = static_cast<int>(workers.size()) < roster_.size() && are_last_with_state(workers);
    const bool waits = std::ranges::any_of(held_, is_notice);
    if (waits) return;  // until its limit
    if (!soon) return end_as_told(going.front(), SIGTERM);
    held_.push_back({false, {}, now_ + options_.preempt_grace / 2, going.front(), SIGTERM});
    return say(fmt::format("{}; no other worker has the training's state yet: {} once another has it", why,
                           workers.size() == 1 ? "it leaves" : "they leave"));
  }
  std::erase_if(held_, is_notice);
  for (const int index : going) hosts_.bar(agents_[index].name);
  // (SIGTERM would have ranks that are still in a world with the others save and end, all of them.)
  let_go(going, why, now_ + options_.preempt_grace);
}

std::vector<int> Membership::workers_on(int agent, bool counted) const {
  std::vector<int> workers;
  for (const auto& [number, worker] : roster_.all()) {
    if (worker.agent == agent && !worker.ended() && (worker.counted || !counted)) workers.push_back(number);
  }
  return workers;
}

std::vector<int> Membership::workers_of(const std::string& host) const {
  std::vector<int> workers;
  for (const KnownWorker* const worker : roster_.counted()) {
    if (worker->host == host) workers.push_back(worker->number);
  }
  return workers;
}

int Membership::latest_agent(const std::string& host) const {
  int latest = -1;
  for (const auto& [index, agent] : agents_) {
    if (agent.name == host) latest = index;
  }
  return latest;
}

}  // namespace cohort::launch
