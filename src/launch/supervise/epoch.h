// One start of a job's ranks (an epoch): who takes part, how far they are, why they are stopped, and what is said of
// their end. A restart is another epoch over the same agents. One thread.
#pragma once

#include "base/result.h"
#include "launch/health/health.h"
#include "launch/health/verdict.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/output/other_hosts.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/elastic_job.h"
#include "launch/supervise/members.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {

/// What goes on of an elastic job when all its workers begin anew.
struct ElasticPast {
  Membership::Past members = {};
  int workers = 0;  ///< that there were: numbers are never given again
};

/// What all epochs of a job share.
struct EpochBudget {
  int server_restarts = 0;                                       ///< that there have been
  std::optional<std::chrono::steady_clock::time_point> limit{};  ///< of the job's time, once ranks run
  ElasticPast elastic = {};
};

class Epoch {
 public:
  /// What its job does.
  struct Events {
    /// A server has ended while ranks run, and how: "exit code 0 after 3.1 s". Who waits for it is told.
    std::function<void(int number, const std::string& how)> on_server_ended;
    /// An elastic job goes on with these: everybody can read it once this returns. Throws cohort::Error.
    std::function<void(const rendezvous::Membership&)> on_members;
    /// So many ranks more are to be started by this agent, which runs none: it is ordered, and the plan has them.
    std::function<void(AgentHandle&, int ranks)> on_more;
    /// And one more by an agent that runs some. Returns its number.
    std::function<int(AgentHandle&, int local_rank)> on_one_more;
    /// The agent cannot be had, and no rank runs yet: whether the job begins without its host.
    std::function<bool(AgentHandle&, const std::string& why)> on_host_missing;
    /// It broke down, and nothing of it runs any more: whether another epoch follows.
    std::function<Restarts::Decision(const Breakdown&)> on_breakdown;
    /// No other follows: what is left to be done before the last word. An error: the job's results are lost.
    std::function<Result<void>()> before_end;
    /// All is said of it.
    std::function<void(int status, bool again)> on_ended;
  };
  /// `number`: of restarts before it. All but `events` outlive this; members are those of `setup.plan`, or of what
  /// `settle` finds there later.
  Epoch(Loop& loop, const JobSetup& setup, AgentPool& agents, RunOutput& run, EpochBudget& budget, int number,
        Events events);

  /// `setup.plan` says who takes part. `shown`: the ranks whose output is shown; empty: all.
  void settle(const std::vector<int>& shown);
  void on_unfit(const AgentHandle* agent, const std::string& why);
  void on_message(AgentHandle& agent, Message message);
  void on_channel_closed(AgentHandle& agent, const std::optional<Error>& error);
  void on_agent_process_ended(AgentHandle& agent);
  void on_signal(int signal);
  void on_reader_gone();
  void on_owner_gone();
  void fail_start(const std::string& why);
  /// All agents are told to start their ranks.
  void note_orders();
  /// Of the job's user. What has been done, or why not.
  Result<std::string> obey(const ControlOrder& order);

  /// Of an elastic job, once it is settled; nullptr.
  const Membership* membership() const noexcept { return elastic_ ? &elastic_->membership() : nullptr; }
  /// It is on its way to a job that runs.
  bool is_newcomer(const AgentHandle& agent) const {
    return elastic_ && elastic_->membership().is_newcomer(agent.host.index);
  }
  /// What has happened to an elastic job, once it is settled: what follows is done.
  Membership::Answer decide(const Event& event) { return follow(elastic_->on(event)); }
  /// `setup.plan` has more ranks.
  void grow();
  bool starting() const noexcept { return stage_ == Stage::Starting; }
  bool running() const noexcept { return stage_ == Stage::Running; }
  bool ended() const noexcept { return stage_ == Stage::Ended; }
  int stop_status() const noexcept { return end_.stop_status.value_or(1); }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { Starting, Running, Stopping, Ended };

  void say(const std::string& text) { run_.say(text); }
  std::string why_not_started() const;
  void on_start_late();
  bool begins_without(AgentHandle& agent, const std::string& why) {
    return stage_ == Stage::Starting && elastic_ && events_.on_host_missing(agent, why);
  }
  void on_started(AgentHandle& agent, const Started& started);
  void look_for_running();
  Ending ending_of(int process, const ProcessEnd& end) const;
  void on_exited(const Exited& exited);
  /// A server that has failed, where the job may go on: it is started again, or gone on without.
  enum class Fate { Failed, Again, Without };
  Fate settle_fate(Ending& ending, int process);
  bool goes_on_without(AgentHandle& agent, const std::string& why);
  ElasticJob::Events elastic_events();
  Membership::Answer follow(Membership::Answer answer);
  void carry_out(const action::Drop& drop);
  void carry_out(const action::Lost& lost);
  void carry_out(const action::Excuse& excuse);
  void carry_out(const action::FailureOver& over);
  void carry_out(const action::EndWorkers& end);
  void carry_out(const action::EndJob& end);
  void carry_out(const action::EndAsTold& end);
  template <typename A>
  void carry_out(const A&) {}  // ElasticJob has done it
  /// A process of which nothing more will be heard.
  void end_lost(int process, bool excused = false);
  void on_started_again(const StartedAgain& started);
  AgentHandle& agent_of(int process) const;
  void look_for_failure();
  void look_for_requeue();
  void look_for_chief(const Exited& exited);
  /// Once all ranks have ended: the servers are asked to, and after them the evaluator.
  void ask_next_role();
  void wait_for_cause();
  void stop_for_failure();
  void tell_failure();
  void on_stuck(const std::string& why);
  void on_agent_ends(AgentHandle& agent, const Ends& ends);
  void on_agent_told(AgentHandle& agent, const Told& told);
  void told_by_agent(const AgentHandle& agent, int signal);
  void on_told(int signal, const std::string& reason);
  void pass_on(int signal);
  Stopping::Grace grace_after(int signal) const;
  void stop(const std::string& reason, int signal, Stopping::Grace grace);
  Stopping::Events stopping_events();
  void tell_agents(int signal, Stopping::Grace grace);
  void lose_agent(const std::string& what);
  void on_host_failed(AgentHandle& agent, const std::string& why);
  void fail_start_of_hosts();
  void check_end();
  JobEnd how_it_ended() const;
  void finish();

  Loop& loop_;
  const JobSetup& setup_;
  const JobSpec& spec_ = setup_.spec;
  AgentPool& agents_;
  RunOutput& run_;
  RunState& state_ = run_.state();
  EpochBudget& budget_;
  Events events_;
  const Milliseconds start_timeout_ = start_timeout_of(spec_, setup_.plan);
  Stage stage_ = Stage::Starting;
  Members members_;
  Stopping stopping_;
  std::unique_ptr<InputReader> input_;
  std::optional<RemoteLogs> remote_logs_;
  int lost_servers_ = 0;         ///< that the job goes on without
  std::map<int, Ending> again_;  ///< by process: the latest failure of a server that was to be started again,
  std::set<int> awaited_;        ///< and those of which it is not known yet whether they have been
  std::optional<HealthWatch> health_;
  std::optional<ElasticJob> elastic_;
  JobEnd end_;                                 ///< what is known of it so far; the rest is in `how_it_ended`
  std::string lost_agent_;                     ///< where that is why the job ends
  std::string undelivered_;                    ///< why the owner lacks what its ranks have sent
  std::map<int, std::string> failed_hosts_;    ///< by index: why their agents do not come
  std::optional<Restarts::Decision> restart_;  ///< nothing runs any more
  bool ordered_ = false;
  bool agent_lost_ = false;
  bool told_to_end_ = false;
  bool told_by_agent_ = false;  ///< and not yet by a signal to this process
  int told_by_ = 0;             ///< the signal that the exit status is of
  Role asked_ = Role::Worker;   ///< those of this role have been told to end; of workers it is not known
  bool workers_asked_ = false;  ///< since TensorFlow's chief has ended
  Clock::time_point started_at_ = Clock::now();
  struct Limits {  ///< until the job is stopped
    Timer start, job, cause, other_hosts;
    Timer requeue;  ///< for the others, once a rank has saved and ended
  } limits_;
  std::vector<int> early_signals_;  ///< that came before ranks ran
  int cause_waits_ = 0;
  Timer tell_limit_;
};

}  // namespace cohort::launch
