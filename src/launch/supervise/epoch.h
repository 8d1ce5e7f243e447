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
  /// All outlive this; members are those of `setup.plan`, or of what `settle` finds there later.
  Epoch(Loop& loop, const JobSetup& setup, AgentPool& agents, Orders& orders, RunOutput& run, JobPast& past);

  /// `setup.plan` says who takes part. `shown`: the ranks whose output is shown; empty: all.
  void settle(const std::vector<int>& shown);
  /// After each step of the loop: what is due by time happens.
  void look();
  void on_unfit(AgentHandle* agent, const std::string& why);
  void on_message(AgentHandle& agent, Message message);
  void on_channel_closed(AgentHandle& agent, const std::optional<Error>& error);
  void on_agent_process_ended(AgentHandle& agent);
  void on_signal(int signal);
  void on_reader_gone();
  void on_owner_gone();
  void fail_start(const std::string& why);
  /// All agents are told to start their ranks.
  void give_orders();
  /// Carries out an order of the job's user. Returns what has been done, or why not.
  Result<std::string> obey(const ControlOrder& order);

  /// The membership of an elastic job, once it is settled; else nullptr.
  const Membership* membership() const noexcept { return elastic_ ? &elastic_->membership() : nullptr; }
  /// It is on its way to a job that runs.
  bool is_newcomer(const AgentHandle& agent) const {
    return elastic_ && elastic_->membership().is_newcomer(agent.host.index);
  }
  /// Takes an event of an elastic job, once it is settled, and carries out what follows.
  Membership::Answer decide(const Event& event) { return follow(elastic_->on(event)); }
  bool starting() const noexcept { return stage_ == Stage::Starting; }
  bool has_ordered() const noexcept { return ordered_; }
  bool running() const noexcept { return stage_ == Stage::Running; }
  /// Nothing of it runs any more, and the agents have ended, too, unless another epoch follows.
  bool ended() const noexcept { return stage_ == Stage::Ended; }
  /// Once it has ended: whether another follows, and by which plan.
  const std::optional<Plan>& next_plan() const noexcept { return next_plan_; }
  /// The last word on it: the exit status. `closed`: an error where the job's results are lost.
  int report(const Result<void>& closed);
  int stop_status() const noexcept { return end_.stop_status.value_or(1); }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { Starting, Running, Stopping, Ended };

  void say(const std::string& text) { run_.say(text); }
  void on_start_late();
  /// Its agent cannot be had: whether an elastic job begins without the host, before any rank runs.
  bool begins_without(AgentHandle& agent, const std::string& why);
  void on_started(AgentHandle& agent, const Started& started);
  void look_for_running();
  void on_exited(const Exited& exited);
  /// A server that has failed: true if it is started again. Says in `ending` whether the job goes on without it.
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
  void carry_out(const A&) {}  // ElasticJob has done it
  /// A process of which nothing more will be heard.
  void end_lost(int process, bool excused = false);
  void end_process(int process, Ending ending, bool well);
  void look_at_health();
  void show_overview();
  void on_started_again(const StartedAgain& started);
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
  void lose_agent(const std::string& what);
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
  JobEnd end_;                                 ///< what is known of it so far; the rest `how_it_ended` adds
  std::string lost_agent_;                     ///< where that is why the job ends
  std::string undelivered_;                    ///< why the owner lacks what its ranks have sent
  std::map<int, std::string> failed_hosts_;    ///< by index: why their agents do not come
  std::optional<Restarts::Decision> restart_;  ///< nothing runs any more
  std::optional<Plan> next_plan_;              ///< where another epoch follows
  bool ordered_ = false;
  bool agent_lost_ = false;
  bool told_to_end_ = false;
  bool told_by_agent_ = false;  ///< and not yet by a signal to this process
  int told_by_ = 0;             ///< the signal that the exit status is of
  Clock::time_point started_at_ = Clock::now();
  struct Limits {  ///< until the job is stopped
    Timer start, job, cause, other_hosts, health;
    Timer requeue;  ///< for the others, once a rank has saved and ended
  } limits_;
  std::vector<int> early_signals_;  ///< that came before ranks ran
  int cause_waits_ = 0;
  Timer tell_limit_, overview_;
};

}  // namespace cohort::launch
