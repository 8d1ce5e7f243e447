// Who takes part in an elastic job: Membership decides it, from what happens, and says what is to be done. Pure: values
// in, values out; it takes the time, and knows neither processes nor sockets. One thread.
//
// Always, whatever happens in whatever order:
// - The training is not lost in silence. Once somebody has trained, a worker that has its state is among those that the
//   job goes on with, or the job ends and says so: fresh workers are never announced alone. No plan (an order, a list,
//   a notice) lets the last one go that has the state, until another has.
// - Each worker counts once: those of an epoch run, are no fewer and no more than allowed (fewer only once somebody's
//   part is done, so that the others end theirs), and rank 0 can give the training to the others.
// - Each worker that was started is counted, or a newcomer that waits to be, or leaves with a limit to it, or has
// ended.
// - One verdict: after the job has been ended nothing is announced, and it is ended once.
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
#include <vector>

namespace cohort::launch {

class Membership {
 public:
  using Time = KnownHosts::Time;

  struct Options {
    int least = 1;
    int most = 0;                          ///< 0: no limit
    std::optional<int> most_changes = {};  ///< nothing: no limit
    int spares = 0;                        ///< that run beside the most
    bool others_may_come = false;          ///< else a job with too few members ends at once
    bool restarts = false;                 ///< a job that breaks down may begin anew
    bool asks_script = false;              ///< the hosts that there are are listed again and again
    bool come_by_themselves = false;       ///< agents of other hosts do
    KnownHosts::Cooldown cooldown = {};
    std::chrono::seconds timeout{};             ///< for others to come
    std::chrono::milliseconds start_timeout{};  ///< for an agent to come, and its ranks to run
    std::chrono::milliseconds grace{};          ///< for those that leave, once the others have gone on
    std::chrono::milliseconds preempt_grace{};  ///< for those whose agent has been told to end
  };
  /// What goes on when all workers of a job begin anew.
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
  Membership(Options options, const Plan& plan, Past past);

  Answer on(const Event& event, Time now);
  /// When Tick is due; nothing: it need not come.
  std::optional<Time> next_look() const;

  const rendezvous::Membership& current() const noexcept { return roster_.current(); }
  const std::set<std::string>& barred() const noexcept { return hosts_.barred(); }
  /// It is on its way to a job that runs.
  bool is_newcomer(int agent) const;
  /// A worker that was to be started beside others does not run yet.
  bool awaits(int worker) const;
  const Roster& roster() const noexcept { return roster_; }
  bool over() const noexcept { return over_; }

 private:
  struct Agent {
    enum class Stage { Coming, Starting, Running, Idle, Gone };
    std::string name;
    int slots = 0;  ///< that it is to start ranks in
    Stage stage = Stage::Running;
    std::optional<Time> limit = {};  ///< for its ranks to run
    bool leaving = false;            ///< with all that runs there
    bool noticed = false;            ///< it has been told to end
    bool newcomer() const noexcept { return stage == Stage::Coming || stage == Stage::Starting; }
    bool has_ranks() const noexcept { return newcomer() || stage == Stage::Running; }
  };
  /// Workers that leave together as planned.
  struct Leaving {
    std::vector<int> workers;
    int agent = 0;
    bool all = false;             ///< that run there
    std::uint64_t epoch = 0;      ///< the first one without them
    bool others_went_on = false;  ///< to that
    std::optional<Time> limit;    ///< then they are told to end,
    int signal = 0;               ///< by this
  };
  /// An order or a notice that waits until others have the training's state.
  struct Held {
    bool kill = false;
    std::string host;                ///< of an order
    std::optional<Time> limit = {};  ///< of a notice
    int agent = -1, signal = 0;
  };
  enum class Course { GoesOn, Fails, Ends };  ///< Ends: it has been said how

  // ---- events ----
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

  // ---- what may be ----
  bool may_change() const noexcept { return running_ && !over_; }
  bool begins_anew() const { return options_.restarts && !roster_.formed(); }
  bool changes_are_used_up() const;
  std::uint64_t changes() const { return current().epoch - first_epoch_; }
  int room() const;
  Result<void> can_spare(int workers) const;
  bool can_lose(const std::vector<int>& workers) const;
  /// None of the others could go on from where these are.
  bool are_last_with_state(const std::vector<int>& workers) const;

  // ---- who goes on ----
  /// Those that have ended, or are lost, or leave.
  Course leave(const std::vector<int>& workers, const std::string& cause);
  Course go_on(std::string cause);
  Course lose_training(const std::string& cause);
  Course end(const std::string& cause, const std::string& why);
  void end_job(int status, std::string why, int signal);
  void end_as_told(int agent, int signal);
  Course announce(const std::string& cause);
  void let_ended_leave();
  void finish(KnownWorker& worker);
  void look_for_members();
  void look_for_waiting();
  void look_for_formed();
  void settle_doubt();

  // ---- newcomers ----
  void fill();
  /// Returns how many.
  int bring(const PlannedHost& host, const std::vector<int>& slots);
  std::vector<int> free_slots(const PlannedHost& host) const;
  void start_ranks(int agent);
  void give_up(int agent, const std::string& why, bool failed);
  /// Its workers that had not ended go with it.
  void drop(int agent, const std::vector<int>& workers, bool failed);
  void take_newcomers();
  void drop_those_nobody_waits_for();
  void lose(KnownWorker& worker);
  int on_their_way() const;

  // ---- leaving as planned ----
  void let_go(const std::vector<int>& agents, const std::string& why, std::optional<Time> limit);
  void let_some_go(int agent, const std::vector<int>& workers, const std::vector<int>& counted, const std::string& why);
  void mark_leaving(const std::vector<int>& workers, int agent, bool all, std::optional<Time> limit);
  void end_leavers(const Leaving& leaving);
  void drain_unlisted();
  void look_for_held();
  void act_on_notices();
  Result<std::string> take_away(const std::string& host, bool kill);

  std::vector<int> workers_on(int agent, bool counted) const;
  std::vector<int> workers_of(const std::string& host) const;  ///< that are counted
  int latest_agent(const std::string& host) const;             ///< -1: there is none
  void say(std::string text) { actions_.push_back(action::Say{std::move(text)}); }
  template <typename A>
  void act(A action) {
    actions_.push_back(std::move(action));
  }

  const Options options_;
  const std::uint64_t first_epoch_;
  KnownHosts hosts_;
  Roster roster_;
  std::map<int, Agent> agents_;
  int next_worker_ = 0, next_agent_ = 0;

  bool ordered_ = false, running_ = false, over_ = false;
  bool finishing_ = false;           ///< somebody's part is done
  bool workers_ended_ = false;       ///< they were asked to
  std::vector<event::Ended> ended_;  ///< of which nothing has followed yet
  std::set<int> fresh_failures_;     ///< workers; the others have formed no world since: they may be why those fail
  bool own_errors_ = true;           ///< these have failed by themselves
  std::optional<Time> wait_limit_;   ///< too few are left, and others may come until then
  std::optional<Time> doubt_limit_;  ///< whether those that are left have the state is heard until then
  std::string doubt_cause_;
  std::optional<Time> announced_at_;  ///< the latest epoch, whose members have formed no world yet
  std::optional<Time> fill_at_, notices_at_;
  std::vector<Leaving> leaving_;
  std::vector<Held> held_;
  /// Hosts that are listed no more, or with fewer slots, and why their workers stay.
  std::map<std::string, std::string> unspared_;

  Time now_{};
  std::vector<Action> actions_;
  std::optional<Action> verdict_;  ///< the last of the actions
  bool taken_ = true;
  Result<std::string> reply_;
};

}  // namespace cohort::launch
