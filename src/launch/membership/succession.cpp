#include "launch/membership/succession.h"

#include <cohort/exit_status.h>

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <utility>

namespace cohort::launch {
namespace {

/// Time to hear from workers; agents send their reports every 0.4 s.
constexpr auto kHearTime = std::chrono::seconds(2);

constexpr const char* kNoState = "no worker that is left has the training's state";

/// Returns " (ranks 0-2 are workers 0,2-3)"; empty if all ranks have their workers' numbers.
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

}  // namespace

Succession::Course Succession::leave(const std::vector<int>& workers, const std::string& cause) {
  bool any = false;
  for (const int number : workers) any = std::exchange(job_.roster.find(number)->counted, false) || any;
  if (job_.over) return Course::GoesOn;
  if (any) return go_on(cause);
  if (job_.wait_limit) job_.say(cause + "; waiting for more hosts");
  return Course::GoesOn;
}

Succession::Course Succession::go_on(std::string cause) {
  Roster& roster = job_.roster;
  if (!roster.others_know({})) {
    const std::vector<const KnownWorker*> left = roster.counted();
    const bool any = std::ranges::any_of(roster.all(), [](const auto& one) { return one.second.newcomer(); });
    // (After some worker has finished, the failure of the others already reports what is lost of the training.)
    if (!roster.begun() || job_.finishing || (left.empty() && !any))
      return end(cause, left.empty() ? "no worker is left" : kNoState);
    // A worker that has formed the world may have got the state since its last report.
    const bool perhaps =
        std::ranges::any_of(left, [&roster](const KnownWorker* one) { return roster.is_member(one->number); });
    if (!perhaps) return lose_training(job_.doubt_limit ? doubt_cause_ + "; " + cause : cause);
    doubt_cause_ = job_.doubt_limit ? doubt_cause_ + "; " + cause : cause;
    if (!job_.doubt_limit) job_.doubt_limit = job_.now + kHearTime;
    return Course::GoesOn;
  }
  std::vector<int> ready;
  for (const auto& [number, worker] : roster.all()) {
    if (worker.newcomer() && worker.to_be_member) ready.push_back(number);
  }
  ready.resize(std::min(ready.size(), static_cast<std::size_t>(job_.room())));
  const int least = job_.options.least;
  if (!ready.empty() && roster.size() + static_cast<int>(ready.size()) >= least) {
    for (const int number : ready) roster.find(number)->counted = true;
    cause +=
        fmt::format("; {} {}", names_of_workers(ready), ready.size() == 1 ? "takes its place" : "take their place");
  }
  const int size = roster.size();
  if (size >= least) return announce(cause);
  const std::string few = fmt::format("{} worker{} left, and {} are wanted", size, size == 1 ? " is" : "s are", least);
  if (job_.changes_are_used_up())
    return end(cause, fmt::format("{}; --reset-limit {} lets no others come", few, job_.changes()));
  if (!job_.options.others_may_come || job_.finishing) return end(cause, few);
  if (job_.wait_limit) {
    job_.say(cause + "; waiting for more hosts");
  } else {
    job_.say(fmt::format("{}; {}: waiting up to {} s for hosts", cause, few, job_.options.timeout.count()));
    job_.wait_limit = job_.now + job_.options.timeout;
  }
  return Course::GoesOn;
}

Succession::Course Succession::announce(const std::string& cause) {
  if (job_.changes_are_used_up()) {
    const auto changes = job_.changes();
    return end(cause, fmt::format("its members have changed {} time{} (--reset-limit)", changes, plural(changes)));
  }
  job_.roster.begin_epoch(cause);
  job_.wait_limit.reset();
  announced_at_ = job_.now;
  const rendezvous::Membership& now = job_.roster.current();
  job_.act(action::Announce{
      now, fmt::format("{}; epoch {} goes on with {}{}", cause, now.epoch, job_.roster.sizes(), numbering_of(now))});
  return Course::GoesOn;
}

void Succession::note_failures(const std::vector<int>& workers, bool by_itself) {
  fresh_failures_.insert(workers.begin(), workers.end());
  own_errors_ = own_errors_ && by_itself;
}

Succession::Course Succession::end(const std::string& cause, const std::string& why) {
  job_.end();
  job_.say(fmt::format("{}; the job cannot go on: {}", cause, why));
  if (fresh_failures_.empty()) {  // no failure is to blame
    end_job(kRequeueStatus, fmt::format("{}; exit status {} asks for the job to be started again", why, kRequeueStatus),
            SIGTERM);
  }
  for (const int worker : std::exchange(fresh_failures_, {})) job_.act(action::Excuse{worker, false});
  return Course::Fails;
}

// Ends the job: fresh ranks have nothing to save, and must not overwrite a checkpoint.
Succession::Course Succession::lose_training(const std::string& cause) {
  const std::string lost = cause;  // (a copy: `cause` may be doubt_cause_)
  if (!fresh_failures_.empty() && (job_.options.restarts || own_errors_)) return end(lost, kNoState);
  fresh_failures_.clear();
  end(lost, kNoState);
  end_job(kRequeueStatus,
          fmt::format("{}: exit status {} asks for the job to be started again, from its last checkpoint (with "
                      "--max-restarts that is done here)",
                      kNoState, kRequeueStatus),
          SIGKILL);
  return Course::GoesOn;
}

void Succession::end_job(int status, std::string why, int signal) {
  job_.end();
  verdict_ = action::EndJob{status, std::move(why), signal};
}

void Succession::end_as_told(int agent, int signal) {
  job_.end();
  verdict_ = action::EndAsTold{agent, signal};
}

void Succession::give_verdict() {
  if (verdict_) job_.actions.push_back(*std::exchange(verdict_, {}));
}

void Succession::finish(KnownWorker& worker) {
  const bool member = worker.counted && job_.roster.takes_part(worker.number);
  worker.counted = false;
  job_.finishing = job_.finishing || member;
  for (auto& [number, one] : job_.roster.all()) one.waits = false;
}

void Succession::note_saved() {
  saved_ = true;
  for (auto& [number, one] : job_.roster.all()) one.reported = false;
}

void Succession::look_for_members() {
  const Roster& roster = job_.roster;
  // Once all that have the state have saved, those without the state, such as a frozen newcomer, have nothing to do.
  // (A worker may have got the state since its last report.)
  const auto may = [&roster](const KnownWorker& one) { return !one.ended() && (roster.knows(one) || !one.reported); };
  const bool saved = saved_ && std::ranges::none_of(
                                   roster.all(), may, [](const auto& one) -> auto& { return one.second; });
  const auto runs = [&roster, saved](int worker) { return roster.runs(worker) && !saved; };
  if (!job_.may_change() || workers_ended_ || job_.wait_limit || job_.doubt_limit || !roster.anybody_runs() ||
      std::ranges::any_of(roster.current().members, runs, &rendezvous::Member::worker))
    return;
  workers_ended_ = true;
  job_.act(action::EndWorkers{});
}

// Called after some worker has finished: checks whether all running workers wait for a world that is never formed. If
// nobody has trained, the others may wait because a rank has ended well; Health reports that as a failure.
void Succession::look_for_waiting() {
  Roster& roster = job_.roster;
  if (!job_.finishing || workers_ended_ || !job_.may_change() || job_.doubt_limit || !roster.formed()) return;
  bool any = false;
  for (const auto& [number, worker] : roster.all()) {
    if (worker.ended()) continue;
    if (!worker.waits) return;
    any = true;
  }
  for (auto& [number, worker] : roster.all()) worker.waits = false;
  const auto counted = [&roster](int worker) { return roster.is_counted(worker); };
  if (any && !roster.others_know({})) {
    job_.say("the training is over; workers that have only come are ended");
    workers_ended_ = true;
    job_.act(action::EndWorkers{});
  } else if (roster.size() > 0 &&
             !std::ranges::all_of(roster.current().members, counted, &rendezvous::Member::worker)) {
    announce("others have done their part");
  }
}

bool Succession::look_for_formed() {
  if (job_.wait_limit || job_.doubt_limit) return false;
  const rendezvous::Membership& now = job_.roster.current();
  const auto has_formed = [this, &now](int worker) { return job_.roster.has_formed(worker, now.epoch); };
  if (std::ranges::none_of(now.members, has_formed, &rendezvous::Member::worker)) return false;
  own_errors_ = true;
  if (!std::exchange(fresh_failures_, {}).empty()) job_.act(action::FailureOver{});
  if (announced_at_ && std::ranges::all_of(now.members, has_formed, &rendezvous::Member::worker)) {
    job_.act(action::Formed{std::chrono::duration_cast<std::chrono::milliseconds>(job_.now - *announced_at_)});
    announced_at_.reset();
  }
  return true;
}

void Succession::settle_doubt() {
  if (!job_.doubt_limit || !job_.roster.others_know({})) return;
  job_.doubt_limit.reset();
  go_on(std::exchange(doubt_cause_, {}));
}

void Succession::look_for_doubt() {
  if (job_.doubt_limit && *job_.doubt_limit <= job_.now) lose_training(doubt_cause_);
}

void Succession::look_for_hosts() {
  if (!job_.wait_limit || *job_.wait_limit > job_.now || job_.over) return;
  end_job(kRequeueStatus,
          fmt::format("no hosts have come within {} s (--elastic-timeout); exit status {} asks for the job to be "
                      "started again",
                      job_.options.timeout.count(), kRequeueStatus),
          SIGTERM);
}

void Succession::take_newcomers() {
  std::map<int, std::vector<int>> by_agent;
  std::set<int> late;
  for (const auto& [number, worker] : job_.roster.all()) {
    if (!worker.newcomer()) continue;
    by_agent[worker.agent].push_back(number);
    if (!worker.to_be_member) late.insert(worker.agent);
  }
  for (auto& [index, workers] : by_agent) {
    if (late.contains(index) || !job_.may_change() || job_.doubt_limit) continue;
    workers.resize(std::min(workers.size(), static_cast<std::size_t>(job_.room())));
    if (workers.empty()) continue;
    for (const int number : workers) job_.roster.find(number)->counted = true;
    const std::string& name = job_.agents[index].name;
    const auto& members = job_.roster.current().members;
    const bool known = std::ranges::find(members, name, &rendezvous::Member::host) != members.end();
    const std::string cause =
        known ? fmt::format("{} {} come on {}", names_of_workers(workers), workers.size() == 1 ? "has" : "have", name)
              : fmt::format("host {} has come with {}", name, names_of_workers(workers));
    if (job_.roster.size() >= job_.options.least)
      announce(cause);
    else
      job_.say(cause + "; waiting for more hosts");
  }
}

}  // namespace cohort::launch
