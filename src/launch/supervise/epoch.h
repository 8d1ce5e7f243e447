// One start of a job's ranks (an epoch): which processes take part, how far they have come, why they are stopped, and
// what is reported of their end. A restart is another epoch over the same agents. One thread.
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
#include "launch/supervise/orders.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

class Epoch {
 public:
  /// All arguments outlive this. `setup.plan` has the members; it may be replaced before `settle` is called.
  Epoch(Loop& loop, const JobSetup& setup, AgentPool& agents, Orders& orders, RunOutput& run, JobPast& past);

  /// Takes the members from `setup.plan`. `shown`: the ranks whose output is shown; empty: all.
  void settle(const std::vector<int>& shown);
  /// Does what is due by time; to be called after each step of the loop.
  void look();
  void on_unfit(AgentHandle* agent, const std::string& why);
  void on_message(AgentHandle& agent, Message message);
  void on_channel_closed(AgentHandle& agent, const std::optional<Error>& error);
  void on_agent_process_ended(AgentHandle& agent);
  void on_signal(int signal);
  void on_reader_gone();
  void on_owner_gone();
  void fail_start(const std::string& why);
  /// Tells all agents to start their ranks.
  void give_orders();
  /// Carries out an order of the job's user. Returns what has been done, or why it has not.
  Result<std::string> obey(const ControlOrder& order);

  /// Returns the membership of an elastic job after `settle`; else nullptr.
  const Membership* membership() const noexcept { return elastic_ ? &elastic_->membership() : nullptr; }
  /// Returns true if the agent is on its way to a job that runs.
  bool is_newcomer(const AgentHandle& agent) const {
    return elastic_ && elastic_->membership().is_newcomer(agent.host.index);
  }
  /// Takes an event of an elastic job after `settle`, and carries out the actions that follow.
  Membership::Answer decide(const Event& event) { return follow(elastic_->on(event)); }
  bool starting() const noexcept { return stage_ == Stage::Starting; }
  bool has_ordered() const noexcept { return ordered_; }
  bool running() const noexcept { return stage_ == Stage::Running; }
  /// Returns true when no process of the epoch runs any more. If no other epoch follows, the agents have ended, too.
  bool ended() const noexcept { return stage_ == Stage::Ended; }
  /// Returns the plan of the next epoch, after this one has ended; nullopt if none follows.
  const std::optional<Plan>& next_plan() const noexcept { return next_plan_; }
  /// Reports how the epoch ended, and returns the exit status. `closed`: an error if the job's results are lost.
  int report(const Result<void>& closed);
  int stop_status() const noexcept { return end_.known.stop_status.value_or(1); }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { Starting, Running, Stopping, Ended };

  void say(const std::string& text) { run_.say(text); }
  void on_start_late();
  /// Called when the agent cannot be started or does not come. Returns true if an elastic job begins without its host.
  bool begins_without(AgentHandle& agent, const std::string& why);
  void on_started(AgentHandle& agent, const Started& started);
  void look_for_running();
  void on_exited(const Exited& exited);
  /// Returns true if a failed server is started again. Sets in `ending` whether the job goes on without the server.
  bool starts_again(Ending& ending, int process);
  bool goes_on_without(AgentHandle& agent, const std::string& why);
  Membership::Answer follow(Membership::Answer answer);
  void carry_out(const action::Drop& drop);
  void carry_out(const action::Lost& lost) { end_lost(lost.worker, true); }
  void carry_out(const action::Excuse& excuse);
  void carry_out(const action::FailureOver&) { members_.forget_failure(); }
  void carry_out(const action::EndWorkers&) { stopping_.ask(Role::Worker, spec_.grace); }
  void carry_out(const action::EndJob& end);
  void carry_out(const action::EndAsTold& end);
  void carry_out(const action::StartRanks&) { members_.grow(); }
  void carry_out(const action::StartOne&) { members_.grow(); }
  template <typename A>
  void carry_out(const A&) {}  // ElasticJob carries out these
  /// Ends a process from which nothing more will come.
  void end_lost(int process, bool excused = false);
  void end_process(int process, Ending ending, bool well);
  void look_at_health();
  void show_overview();
  void on_started_again(const StartedAgain& started);
  void look_for_failure();
  void look_for_requeue();
  void look_for_chief(const Exited& exited);
  /// Called after all ranks have ended: asks the servers to end, and after them the evaluator.
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
  void on_host_failed(AgentHandle& agent, const std::string& why);
  void fail_start_of_hosts();
  void check_end();
  Restarts::Decision after(const Verdict& verdict);
  JobEnd how_it_ended() const;
  void finish();

  Loop& loop_;
  const JobSetup& setup_;
  const JobSpec& spec_ = setup_.spec;
  AgentPool& agents_;
  Orders& orders_;
  RunOutput& run_;
  JobPast& past_;
  const Milliseconds start_timeout_ = start_timeout_of(spec_, setup_.plan);
  Stage stage_ = Stage::Starting;
  Members members_;
  StopOrders stopping_;
  std::unique_ptr<InputReader> input_;
  std::optional<ElasticJob> elastic_;
  EpochEnd end_;
  std::map<int, std::string> failed_hosts_;    ///< why agents do not come, by host index
  std::optional<Restarts::Decision> restart_;  ///< set when no process runs any more
  std::optional<Plan> next_plan_;              ///< plan of the epoch that follows, if any
  bool ordered_ = false;
  bool passed_on_usr1_ = false;  ///< the ranks got SIGUSR1; those with a Preemption save and end
  bool told_by_agent_ = false;   ///< an agent was told to end, and this process has not got the same signal yet
  Clock::time_point started_at_ = Clock::now();
  struct Limits {  ///< timers that run until the job is stopped
    Timer start, job, cause, other_hosts, health;
    Timer requeue;  ///< time for the other ranks, after a rank has saved and ended
  } limits_;
  std::vector<int> early_signals_;  ///< signals that came before ranks ran
  int cause_waits_ = 0;
  Timer tell_limit_, overview_;
};

}  // namespace cohort::launch
