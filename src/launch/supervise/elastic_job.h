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
#include "launch/supervise/orders.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/supervisor.h"

#include <optional>
#include <vector>

namespace cohort::launch {

class ElasticJob {
 public:
  /// All outlive this, but `past`.
  ElasticJob(Loop& loop, const JobSetup& setup, AgentPool& agents, Orders& orders, RunOutput& run, HealthWatch& health,
             Membership::Past past);

  const Membership& membership() const noexcept { return membership_; }
  /// Carries out what follows from it. The actions in the answer are the epoch's.
  Membership::Answer on(const Event& event);
  /// That time has passed, or the script has listed the hosts: since it was asked last, for `on`.
  std::vector<Event> take();
  /// All ranks run: hosts may come and go.
  Membership::Answer begin();
  /// The job is being ended.
  void stop();

  /// An order of the job's user as an event, or why it cannot be carried out.
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
  void grow();
  void wait_for_next();

  Loop& loop_;
  const JobSetup& setup_;
  AgentPool& agents_;
  Orders& orders_;
  RunOutput& run_;
  HealthWatch& health_;
  std::vector<Event> due_;
  Membership membership_;
  std::vector<Action> rest_;
  std::optional<Discovery> discovery_;
  Timer tick_;
  std::optional<Membership::Time> tick_at_;
};

/// Agents' reports of their workers as an event.
event::Reported reported_by(const Reports& reports);
/// A rank's end, before it is known whether it is a failure.
event::Ended ended_by(const Ending& ending);

}  // namespace cohort::launch
