// An elastic job while its ranks run: tells Membership (membership/) what happens to its processes and hosts, and
// carries out what that decides. What concerns the epoch as a whole (who has failed, how it ends) it gives back to it.
// One thread.
#pragma once

#include "launch/health/health.h"
#include "launch/health/verdict.h"
#include "launch/loop.h"
#include "launch/membership/membership.h"
#include "launch/messages.h"
#include "launch/start/agent_pool.h"
#include "launch/start/discovery.h"
#include "launch/supervise/control.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/supervisor.h"

#include <functional>
#include <optional>
#include <vector>

namespace cohort::launch {

class ElasticJob {
 public:
  struct Events {
    /// Time has passed, or the script has listed the hosts: it is to come back by `on`.
    std::function<void(const Event&)> on_event;
    /// The job goes on with these: everybody can read it once this returns. Throws cohort::Error.
    std::function<void(const rendezvous::Membership&)> on_members;
    /// So many ranks more are to be started by this agent, which runs none: it is ordered, and the plan has them.
    std::function<void(AgentHandle&, int ranks)> on_more;
    /// And one more by an agent that runs some. Returns its number.
    std::function<int(AgentHandle&, int local_rank)> on_one_more;
  };
  /// All outlive this, but `past` and `events`.
  ElasticJob(Loop& loop, const JobSetup& setup, AgentPool& agents, RunOutput& run, HealthWatch& health,
             Membership::Past past, Events events);

  const Membership& membership() const noexcept { return membership_; }
  /// Carries out what follows from it. The actions in the answer are the epoch's.
  Membership::Answer on(const Event& event);
  /// All ranks run: hosts may come and go.
  Membership::Answer begin();
  /// The job is being ended.
  void stop();

  /// What the job's user wants, as an event; or why it cannot be.
  Result<Event> event_of(const ControlOrder& order) const;

 private:
  // Each of these acts, or adds to what is given back.
  void carry_out(const action::Say& say);
  void carry_out(const action::Announce& announce);
  void carry_out(const action::Formed& formed);
  void carry_out(const action::AddAgent& add);
  void carry_out(const action::StartRanks& start);
  void carry_out(const action::StartOne& start);
  void carry_out(const action::Finish& finish);
  void carry_out(const action::Hold& hold);
  void carry_out(const action::Leaves& leaves);
  void carry_out(const action::StopRanks& stop);
  void carry_out(const action::Kill& kill);
  template <typename A>
  void carry_out(const A& action) {
    rest_.emplace_back(action);
  }
  AgentHandle& agent(int index) { return *agents_.members().at(static_cast<std::size_t>(index)); }
  void wait_for_next();

  Loop& loop_;
  const JobSetup& setup_;
  AgentPool& agents_;
  RunOutput& run_;
  HealthWatch& health_;
  const Events events_;
  Membership membership_;
  std::vector<Action> rest_;
  std::optional<Discovery> discovery_;
  Timer tick_;
  std::optional<Membership::Time> tick_at_;
};

/// What agents say of their workers, as an event.
event::Reported reported_by(const Reports& reports);
/// A rank's end, before it is known whether it is a failure.
event::Ended ended_by(const Ending& ending);

}  // namespace cohort::launch
