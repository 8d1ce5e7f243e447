// Membership decides which processes take part in an elastic job: events in, actions out. Pure: it is given the time,
// and knows neither processes nor sockets. One thread.
//
// Always, whatever happens in whatever order:
// - The training is not lost in silence. Once somebody has trained, a worker that has its state is among those that the
//   job goes on with, or the job ends and says so: fresh workers are never announced alone. No plan (an order, a list,
//   a notice) lets the last one go that has the state, until another has; who leaves is a member again where the others
//   are lost before they have formed a world without it.
// - Each worker counts once: those of an epoch run, are no fewer and no more than allowed (fewer only once somebody's
//   part is done, so that the others end theirs), and rank 0 can give the training to the others.
// - Each worker that was started is counted, or a newcomer that waits to be, or leaves with a limit to it, or has
//   ended. Those that have ended are forgotten once no epoch has them.
// - One verdict: after the job has been ended nothing is announced, and it is ended once.
#pragma once

#include "base/result.h"
#include "launch/membership/departures.h"
#include "launch/membership/events.h"
#include "launch/membership/known_hosts.h"
#include "launch/membership/newcomers.h"
#include "launch/membership/roster.h"
#include "launch/membership/standing.h"
#include "launch/membership/succession.h"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {

class Membership {
 public:
  using Time = Standing::Time;
  using Options = MembershipOptions;

  /// State that outlives a restart of all workers.
  struct Past {
    std::set<std::string> barred = {};
    std::uint64_t next_epoch = 0;  ///< those before it were of workers that are all gone
  };
  struct Answer {
    bool taken = true;          ///< false: the job cannot go on, or it is none of Membership's
    Result<std::string> reply;  ///< of an order
    std::vector<Action> actions;
  };

  /// `plan`: what runs where at the start.
  Membership(Options options, const Plan& plan, Past past)
      : job_(std::move(options), plan, std::move(past.barred), past.next_epoch) {}
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  Answer on(const Event& event, Time now);
  /// When Tick is due; nothing: it need not come.
  std::optional<Time> next_look() const;

  const rendezvous::Membership& current() const noexcept { return job_.roster.current(); }
  const std::set<std::string>& barred() const noexcept { return job_.hosts.barred(); }
  /// It is on its way to a job that runs.
  bool is_newcomer(int agent) const { return job_.is_newcomer(agent); }
  /// A worker that was to be started beside others does not run yet.
  bool awaits(int worker) const;
  const Roster& roster() const noexcept { return job_.roster; }
  bool over() const noexcept { return job_.over; }

 private:
  using Course = Succession::Course;

  void take(const event::Ordered& event);
  void take(const event::Running& event);
  void take(const event::Stopping& event);
  void take(const event::Tick& event);
  void take(const event::Reported& event);
  void take(const event::Ended& event);
  void take(const event::StoppedTooLong& event);
  void take(const event::StartedOne& event);
  void take(const event::AgentLost& event);
  void take(const event::AgentFailed& event);
  void take(const event::AgentJoined& event);
  void take(const event::AgentCame& event);
  void take(const event::AgentStarted& event);
  void take(const event::AgentEmpty& event);
  void take(const event::AgentNoticed& event);
  void take(const event::Listed& event);
  void take(const event::Add& event);
  void take(const event::TakeAway& event);

  /// Workers that have failed or are lost: who is leaving takes their place, where it still can and is needed.
  Course lose(const std::vector<int>& workers, std::string cause);
  void lose_host(const event::AgentLost& event, KnownAgent& agent);
  void let_ended_leave();
  /// It was no member, or not any more.
  void let_go_of(KnownWorker& worker, const event::Ended& ended);
  void drop_those_nobody_waits_for();

  Standing job_;
  Succession succession_{job_};
  Newcomers newcomers_{job_};
  Departures departures_{job_, succession_};
  std::vector<event::Ended> ended_;  ///< of which nothing has followed yet
  bool taken_ = true;
  Result<std::string> reply_;
};

}  // namespace cohort::launch
