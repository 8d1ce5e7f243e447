// Membership decides which processes take part in an elastic job: events in, actions out. Pure: it gets the time as an
// argument, and knows neither processes nor sockets. One thread.
//
// These rules always hold, in any order of events:
// - The training is never lost silently. After any training, the job goes on only with a worker that has the state
// among its members, or it ends and says so. An epoch of only fresh workers is never announced then. No plan (an order,
// a list, a notice) lets the last worker with the state go until another has it. A leaving worker becomes a member
// again if the others are lost before they have formed a world without it.
// - Each worker counts once. The workers of an epoch run; their number is within the limits (below the minimum only
// after a worker has finished, so that the others finish, too); rank 0 can give the training to the others.
// - Each started worker is counted, or is a newcomer that waits to be, or leaves within a time limit, or has ended.
// Ended workers are forgotten when no epoch has them.
// - There is one verdict: the job is ended once, and nothing is announced after that.
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
    std::uint64_t next_epoch = 0;  ///< earlier epochs had workers that are all gone
  };
  struct Answer {
    bool taken = true;          ///< false: the job cannot go on, or the event is not Membership's
    Result<std::string> reply;  ///< reply to an order
    std::vector<Action> actions;
  };

  /// `plan`: which host runs which ranks at the start.
  Membership(Options options, const Plan& plan, Past past)
      : job_(std::move(options), plan, std::move(past.barred), past.next_epoch) {}
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  Answer on(const Event& event, Time now);
  /// Returns when Tick is due; nullopt: never.
  std::optional<Time> next_look() const;

  const rendezvous::Membership& current() const noexcept { return job_.roster.current(); }
  const std::set<std::string>& barred() const noexcept { return job_.hosts.barred(); }
  /// Returns true if the agent is on its way to a job that runs.
  bool is_newcomer(int agent) const { return job_.is_newcomer(agent); }
  /// Returns true if a worker that was ordered beside running ones does not run yet.
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

  /// Handles workers that have failed or are lost: leaving workers replace them where they still can and are needed.
  Course lose(const std::vector<int>& workers, std::string cause);
  void lose_host(const event::AgentLost& event, KnownAgent& agent);
  void let_ended_leave();
  /// Handles the end of a worker that was not a member, or no longer one.
  void let_go_of(KnownWorker& worker, const event::Ended& ended);
  void drop_those_nobody_waits_for();

  Standing job_;
  Succession succession_{job_};
  Newcomers newcomers_{job_};
  Departures departures_{job_, succession_};
  std::vector<event::Ended> ended_;  ///< events whose consequences are still to be decided
  bool taken_ = true;
  Result<std::string> reply_;
};

}  // namespace cohort::launch
