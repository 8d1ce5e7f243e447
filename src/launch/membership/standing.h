// State of an elastic job: its options, workers, hosts and agents, and the operations on them. The parts of Membership
// share it. Pure. One thread.
#pragma once

#include "base/result.h"
#include "launch/membership/events.h"
#include "launch/membership/known_hosts.h"
#include "launch/membership/roster.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

struct MembershipOptions {
  int least = 1;
  int most = 0;                          ///< 0: no limit
  std::optional<int> most_changes = {};  ///< nullopt: no limit
  int spares = 0;                        ///< workers that run beyond `most`
  bool others_may_come = false;          ///< false: a job with too few members ends immediately
  bool restarts = false;                 ///< a job that breaks down may begin anew
  bool asks_script = false;              ///< the discovery script lists the hosts regularly
  bool come_by_themselves = false;       ///< agents of other hosts come by themselves
  KnownHosts::Cooldown cooldown = {};
  std::chrono::seconds timeout{};             ///< time for other workers to come
  std::chrono::milliseconds start_timeout{};  ///< time for an agent to come, and for its ranks to run
  std::chrono::milliseconds grace{};          ///< time for leaving workers to end, after the others have gone on
  std::chrono::milliseconds preempt_grace{};  ///< the same time if their agent has been told to end
};

struct KnownAgent {
  enum class Stage { Coming, Starting, Running, Idle, Gone };

  std::string name;
  int slots = 0;  ///< slots in which it starts ranks
  Stage stage = Stage::Running;
  std::optional<KnownHosts::Time> limit = {};  ///< time limit for its ranks to run
  bool leaving = false;                        ///< leaves with all its processes
  bool noticed = false;                        ///< the agent has been told to end

  bool newcomer() const noexcept { return stage == Stage::Coming || stage == Stage::Starting; }
  bool has_ranks() const noexcept { return newcomer() || stage == Stage::Running; }
};

struct Standing {
  using Time = KnownHosts::Time;

  Standing(MembershipOptions wanted, const Plan& plan, std::set<std::string> barred, std::uint64_t first);

  bool may_change() const noexcept { return running && !over; }
  bool begins_anew() const { return options.restarts && !roster.formed(); }
  bool changes_are_used_up() const;
  std::uint64_t changes() const { return roster.current().epoch - first_epoch; }
  int most() const;
  int room() const;
  Result<void> can_spare(int workers) const;
  /// `others_return`: workers that leave can take their place.
  bool can_lose(const std::vector<int>& workers, bool others_return = false) const;
  /// Returns true if no other worker could go on from the state that these have.
  bool are_last_with_state(const std::vector<int>& workers) const {
    return roster.others_know({}) && !roster.others_know(workers);
  }
  bool is_newcomer(int agent) const;
  std::vector<int> workers_on(int agent, bool counted) const;  ///< workers that have not ended
  std::vector<int> workers_of(const std::string& host) const;  ///< workers that are counted
  int latest_agent(const std::string& host) const;             ///< returns -1 if there is none

  void end() noexcept;
  void give_up(int agent, const std::string& why, bool failed);
  /// Drops an agent and those of its workers that have not ended.
  void drop(int agent, const std::vector<int>& workers, bool failed);
  void lose(KnownWorker& worker);
  void forget_ended();

  void say(std::string text) { actions.emplace_back(action::Say{std::move(text)}); }
  template <typename A>
  void act(A action) {
    actions.emplace_back(std::move(action));
  }

  const MembershipOptions options;
  const std::uint64_t first_epoch;
  KnownHosts hosts;
  Roster roster;
  std::map<int, KnownAgent> agents;  ///< agents that are gone are forgotten
  int next_worker = 0, next_agent = 0;
  bool ordered = false, running = false, over = false;
  bool finishing = false;           ///< some worker has finished
  std::optional<Time> wait_limit;   ///< set if too few workers are left: others may come until then
  std::optional<Time> doubt_limit;  ///< time limit to hear whether the remaining workers have the state
  Time now{};
  std::vector<Action> actions;
};

std::string plural(std::size_t count);
/// Returns "workers 1-2".
std::string names_of_workers(const std::vector<int>& workers);

}  // namespace cohort::launch
