// An elastic job while its ranks run: tells Membership (membership/) what happens to its processes and hosts, and
// carries out Membership's actions. Returns actions about the whole epoch (which ranks have failed, how it ends) to the
// Epoch. One thread.
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
  /// All arguments but `past` outlive this.
  ElasticJob(Loop& loop, const JobSetup& setup, AgentPool& agents, Orders& orders, RunOutput& run, HealthWatch& health,
             Membership::Past past);

  const Membership& membership() const noexcept { return membership_; }
  /// Gives the event to Membership, and carries out its actions. Actions left in the answer are for the epoch.
  Membership::Answer on(const Event& event);
  /// Returns the events since the last call, to be given to `on`: passed time, and hosts that the script has listed.
  std::vector<Event> take();
  /// Called when all ranks run: from now on hosts may come and go.
  Membership::Answer begin();
  /// Called when the job is being ended.
  void stop();

  /// Returns an order of the job's user as an event, or why it cannot be carried out.
  Result<Event> event_of(const ControlOrder& order) const;

 private:
  // Each overload carries out its action, or adds it to the actions that are returned.
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

/// Returns an agent's reports of its workers as an event.
event::Reported reported_by(const Reports& reports);
/// Returns a process's end as an event, before it is known whether it is a failure.
event::Ended ended_by(const Ending& ending);

}  // namespace cohort::launch
