#include "launch/membership/membership.h"

#include <cohort/exit_status.h>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <iterator>
#include <utility>

namespace cohort::launch {
namespace {

/// Describes a worker's end: "worker 3 (h2) was killed by SIGKILL".
std::string how_it_left(const KnownWorker& worker, const event::Ended& ended) {
  const std::string who = fmt::format("worker {} ({})", worker.number, worker.host);
  if (ended.how == event::Ended::How::Notice) return who + " left on notice";
  if (ended.how == event::Ended::How::Killed && worker.stopped)
    return fmt::format("{} was stopped for {} s and is killed", who, worker.stopped->count());
  return fmt::format("{} {} {}", who, ended.how == event::Ended::How::Killed ? "was" : "ended with", ended.status);
}

}  // namespace

Membership::Answer Membership::on(const Event& event, Time now) {
  job_.now = now;
  taken_ = true;
  reply_ = {};
  std::visit([this](const auto& one) { take(one); }, event);
  drop_those_nobody_waits_for();
  departures_.forget();
  job_.forget_ended();
  succession_.give_verdict();
  return {taken_, std::move(reply_), std::exchange(job_.actions, {})};
}

std::optional<Membership::Time> Membership::next_look() const {
  std::optional<Time> next;
  for (const auto& time : {job_.wait_limit, job_.doubt_limit, newcomers_.next_look(), departures_.next_look()}) {
    if (time && (!next || *time < *next)) next = time;
  }
  return next;
}

bool Membership::awaits(int worker) const {
  const auto found = job_.roster.all().find(worker);
  return found != job_.roster.all().end() && found->second.stage == KnownWorker::Stage::Ordered;
}

void Membership::take(const event::Ordered&) { job_.ordered = true; }

void Membership::take(const event::Running& event) {
  job_.running = true;
  job_.next_agent = event.agents;
  for (const PlannedHost& host : event.usable)
    job_.agents[host.index] = {host.name, host.slots, KnownAgent::Stage::Idle};
  newcomers_.begin();
  let_ended_leave();
}

void Membership::take(const event::Stopping&) {
  job_.end();
  newcomers_.end();
  departures_.end();
  for (auto& [index, agent] : job_.agents) {
    agent.limit.reset();
    if (agent.newcomer()) agent.stage = KnownAgent::Stage::Gone;
  }
}

void Membership::take(const event::Tick&) {
  departures_.look();
  newcomers_.look();
  for (auto& [index, agent] : job_.agents) {
    if (!agent.limit || *agent.limit > job_.now) continue;
    job_.give_up(index,
                 fmt::format("no sign of running ranks from {} after {:.0f} s", agent.name,
                             std::chrono::duration<double>(job_.options.start_timeout).count()),
                 true);
  }
  succession_.look_for_doubt();
  succession_.look_for_hosts();
}

void Membership::take(const event::Reported& event) {
  bool news = false, newcomers = false;
  for (const event::Reported::One& one : event.workers) {
    KnownWorker* const worker = job_.roster.find(one.worker);
    if (worker == nullptr || worker->ended()) continue;
    worker->waits = one.waits;
    worker->reported = true;
    worker->to_be_member = worker->to_be_member || one.to_be_member;
    news = news || one.formed_epoch > worker->formed_epoch || (one.has_state && !worker->has_state);
    job_.roster.report(*worker, one.formed_epoch, one.has_state);
    newcomers = newcomers || worker->newcomer();
  }
  if (!job_.may_change()) return;
  if (news) {
    if (succession_.look_for_formed()) departures_.note_formed();
    succession_.settle_doubt();
    departures_.look_for_held();
  }
  if (newcomers) succession_.take_newcomers();
  succession_.look_for_waiting();
  succession_.look_for_members();
}

void Membership::take(const event::Ended& event) {
  KnownWorker* const worker = job_.roster.find(event.worker);
  if (worker == nullptr || worker->ended()) return;
  worker->stage = KnownWorker::Stage::Ended;
  job_.roster.report(*worker, event.formed_epoch, event.has_state);
  ended_.push_back(event);
  // Only workers that have the training decide how a job ends: a newcomer or a leaving worker may not be able to save.
  const bool decides = job_.roster.takes_part(worker->number) && job_.roster.knows(*worker);
  if (job_.over && job_.running && !decides && event.how != event::Ended::How::Done)
    job_.act(action::Excuse{worker->number});
  if (decides && event.how == event::Ended::How::Asked) succession_.note_saved();
  let_ended_leave();
  succession_.look_for_members();
}

void Membership::take(const event::StoppedTooLong& event) {
  KnownWorker* const worker = job_.roster.find(event.worker);
  taken_ = worker != nullptr && !worker->ended() && job_.may_change() && !job_.begins_anew();
  if (!taken_ || worker->stopped) return;
  std::vector<int> dying{worker->number};
  for (const KnownWorker* const one : job_.roster.counted()) {
    if (one->stopped && !one->ended() && job_.roster.takes_part(one->number)) dying.push_back(one->number);
  }
  taken_ =
      !worker->counted || !job_.roster.takes_part(worker->number) || job_.can_lose(dying, departures_.may_take_back());
  if (!taken_) return;
  worker->stopped = event.since;
  job_.act(action::Kill{worker->agent, worker->number});
}

void Membership::take(const event::StartedOne& event) {
  KnownWorker* const worker = job_.roster.find(event.worker);
  if (worker == nullptr || worker->stage != KnownWorker::Stage::Ordered) return;
  if (event.why_not.empty()) {
    worker->stage = KnownWorker::Stage::Running;
    return;
  }
  job_.hosts.note_failure(worker->host, job_.now);
  job_.say(fmt::format("worker {} cannot be started on {}: {}", worker->number, worker->host, event.why_not));
  job_.lose(*worker);
}

void Membership::take(const event::AgentLost& event) {
  const auto found = job_.agents.find(event.agent);
  // (Its connection may end while the consequences of its loss are handled.)
  if (found == job_.agents.end() || found->second.stage == KnownAgent::Stage::Gone)
    return void(taken_ = !job_.over && event.agent < job_.next_agent);
  KnownAgent& agent = found->second;
  if (agent.stage == KnownAgent::Stage::Idle) agent.stage = KnownAgent::Stage::Gone;
  // (A failure at the start is not judged before all ranks run.)
  const bool starts = job_.ordered && !job_.running && !job_.over && ended_.empty();
  taken_ = (job_.may_change() || starts) && agent.has_ranks();
  if (!taken_) return;
  if (agent.newcomer()) return job_.give_up(event.agent, fmt::format("{} is lost ({})", agent.name, event.why), true);
  lose_host(event, agent);
}

void Membership::lose_host(const event::AgentLost& event, KnownAgent& agent) {
  const std::vector<int> lost = job_.workers_on(event.agent, false);
  std::vector<int> members;
  std::ranges::copy_if(lost, std::back_inserter(members),
                       [this](int worker) { return job_.roster.takes_part(worker); });
  for (const int number : lost) job_.roster.find(number)->stage = KnownWorker::Stage::Ended;
  Course course = Course::GoesOn;
  if (lost.empty()) {
    job_.say(fmt::format("{} is lost ({}), where nothing ran any more", agent.name, event.why));
  } else {
    const bool one = lost.size() == 1;
    const std::string cause = fmt::format("{} {} lost with {} host {} ({})", names_of_workers(lost), one ? "is" : "are",
                                          one ? "its" : "their", agent.name, event.why);
    if (members.empty()) {
      const bool left = std::ranges::all_of(lost, [this](int worker) { return job_.roster.find(worker)->leaving; });
      job_.say(left ? cause : cause + " before it was a member; the job goes on without");
    } else if (job_.begins_anew()) {
      job_.say(cause);
      course = Course::Fails;
    } else {
      succession_.note_failures(members, false);
      course = lose(lost, cause);
      taken_ = course != Course::Fails || job_.options.restarts;
      if (!taken_) return;
    }
  }
  if (!agent.leaving) job_.hosts.note_failure(agent.name, job_.now);
  job_.drop(event.agent, lost, course == Course::Fails);
}

void Membership::take(const event::AgentFailed& event) {
  taken_ = is_newcomer(event.agent);
  if (taken_) job_.give_up(event.agent, event.why, true);
}

void Membership::take(const event::AgentJoined& event) {
  taken_ = is_newcomer(event.agent);
  if (taken_) newcomers_.start_ranks(event.agent);
}

void Membership::take(const event::AgentCame& event) { newcomers_.take(event.host); }

void Membership::take(const event::AgentStarted& event) {
  taken_ = is_newcomer(event.agent);
  if (!taken_) return;
  job_.agents[event.agent].stage = KnownAgent::Stage::Running;
  job_.agents[event.agent].limit.reset();
  for (const int number : job_.workers_on(event.agent, false))
    job_.roster.find(number)->stage = KnownWorker::Stage::Running;
}

void Membership::take(const event::AgentEmpty& event) {
  const auto found = job_.agents.find(event.agent);
  if (found == job_.agents.end()) return;
  for (const int number : job_.workers_on(event.agent, false)) {  // (ranks that were ordered too late)
    if (awaits(number)) job_.lose(*job_.roster.find(number));
  }
  KnownAgent& agent = found->second;
  agent.leaving = false;
  agent.limit.reset();
  agent.stage = agent.noticed ? KnownAgent::Stage::Gone : KnownAgent::Stage::Idle;
  if (agent.noticed) job_.act(action::Finish{event.agent});
}

void Membership::take(const event::AgentNoticed& event) {
  const bool goes = event.signal == SIGTERM || event.signal == SIGHUP;  // (a launcher's terminal is closed)
  taken_ = job_.may_change() && goes && event.agent < job_.next_agent;
  const auto found = job_.agents.find(event.agent);
  if (!taken_ || found == job_.agents.end() || std::exchange(found->second.noticed, true)) return;
  departures_.note_notice();
}

void Membership::take(const event::Listed& event) {
  if (!job_.may_change()) return;
  job_.hosts.list(event.hosts);
  departures_.drain_unlisted();
  newcomers_.fill();
}

void Membership::take(const event::Add& event) {
  if (!job_.may_change()) return void(reply_ = fail(ErrorCode::Unavailable, "the job is about to end"));
  const PlannedHost& host = event.host;
  job_.hosts.add(host);
  departures_.keep(host.name);
  const int before = newcomers_.on_their_way();
  newcomers_.fill();
  const int started = newcomers_.on_their_way() - before;
  job_.say(fmt::format("host {} is added (cohort ctl)", host.name));
  if (started > 0)
    reply_ = fmt::format("{} worker{} started on {}", started, started == 1 ? " is" : "s are", host.name);
  else if (newcomers_.free_slots(host).empty())
    reply_ = fmt::format("{} is noted; there is no place for more than its {} now", host.name, host.slots);
  else
    reply_ = fmt::format("{} is noted; the job has as many workers as it may have now", host.name);
}

void Membership::take(const event::TakeAway& event) {
  if (job_.may_change())
    reply_ = departures_.take_away(event.host, event.kill);
  else
    reply_ = fail(ErrorCode::Unavailable, "the job is about to end");
}

Membership::Course Membership::lose(const std::vector<int>& workers, std::string cause) {
  const Roster& roster = job_.roster;
  const auto counted = [&roster](int worker) { return roster.is_counted(worker); };
  const auto gone = static_cast<int>(std::ranges::count_if(workers, counted));
  const int left = roster.size() - gone;
  const bool enough = left >= job_.options.least && roster.others_know(workers);
  if (gone > 0 && !enough && job_.may_change() && !job_.finishing && !job_.changes_are_used_up()) {
    const std::vector<int> back = departures_.take_back(job_.most() - left);
    if (!back.empty())
      cause += fmt::format("; {} {} after all", names_of_workers(back), back.size() == 1 ? "stays" : "stay");
  }
  return succession_.leave(workers, cause);
}

void Membership::let_ended_leave() {
  if (!job_.may_change()) return;
  std::vector<int> workers, on_notice;
  std::string cause;
  const bool anew = job_.begins_anew();
  bool breaks_down = false;  // all workers begin anew
  for (const event::Ended& ended : std::exchange(ended_, {})) {
    KnownWorker& worker = *job_.roster.find(ended.worker);
    const bool member = worker.counted && job_.roster.takes_part(worker.number);
    // (A worker that was to leave, and leaves although it is needed again, has not finished its part.)
    const bool had_left = member && !job_.roster.is_member(worker.number);
    const bool done = ended.how == event::Ended::How::Done || ended.how == event::Ended::How::Asked;
    const bool notice = ended.how == event::Ended::How::Notice || (done && had_left);
    if ((done && !had_left) || (notice && job_.finishing)) {
      if (!member && ended.how != event::Ended::How::Done) job_.act(action::Excuse{worker.number});
      succession_.finish(worker);
      continue;
    }
    if (anew && !notice) {
      worker.counted = false;
      breaks_down = true;
      job_.act(action::Excuse{worker.number, false});
      continue;
    }
    job_.act(action::Excuse{worker.number});
    job_.act(action::Leaves{worker.number});
    if (!member) {
      let_go_of(worker, ended);
      continue;
    }
    cause += (cause.empty() ? "" : "; ") + how_it_left(worker, ended);
    workers.push_back(worker.number);
    if (notice) {
      on_notice.push_back(worker.number);
      // The slot is kept unused like that of a worker that has failed.
      job_.hosts.hold(worker.host, worker.slot, job_.now);
    } else {
      job_.hosts.note_failure(worker.host, job_.now);
      succession_.note_failures({worker.number}, ended.how == event::Ended::How::Failed);
    }
  }
  if (breaks_down) {
    for (const int worker : workers) job_.roster.find(worker)->counted = false;
    return;
  }
  if (workers.empty() || lose(workers, cause) != Course::Fails) return;
  for (const int worker : on_notice) job_.act(action::Excuse{worker, false});
  if (on_notice.size() == workers.size() && job_.roster.anybody_runs()) {
    succession_.end_job(
        kRequeueStatus,
        fmt::format("too many workers have left on notice; exit status {} asks for the job to be started again",
                    kRequeueStatus),
        SIGTERM);
  }
}

void Membership::let_go_of(KnownWorker& worker, const event::Ended& ended) {
  const bool leaver = !std::exchange(worker.counted, false) && worker.leaving;
  if (leaver) return;  // the worker was to leave, and has ended by itself
  if (ended.how == event::Ended::How::Notice)
    job_.hosts.hold(worker.host, worker.slot, job_.now);
  else
    job_.hosts.note_failure(worker.host, job_.now);
  job_.say(how_it_left(worker, ended) + " before it was a member; the job goes on without it");
}

// To be called when no worker runs any more.
void Membership::drop_those_nobody_waits_for() {
  if (!job_.running || job_.roster.anybody_runs()) return;
  for (const auto& [index, agent] : job_.agents) {
    if (agent.stage == KnownAgent::Stage::Coming) job_.drop(index, {}, false);
  }
}

}  // namespace cohort::launch
