// A job (what lives as long as it, however often its ranks are started) and its epochs (one start of the ranks), of
// which there is one at a time; a restart is another epoch with the same agents. job.cpp has the job; epoch.cpp the
// course of an epoch and what becomes of servers that fail, epoch_end.cpp how it ends. One thread.
#pragma once

#include "base/signals.h"
#include "base/terminal.h"
#include "launch/health/health.h"
#include "launch/health/verdict.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/output/announcer.h"
#include "launch/output/display.h"
#include "launch/output/job_record.h"
#include "launch/output/live_run.h"
#include "launch/output/other_hosts.h"
#include "launch/output/run_folder.h"
#include "launch/output/text.h"
#include "launch/plan/rank_environment.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/side_commands.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"
#include "net/secret.h"
#include "net/served_store.h"

#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {

// What the supervisor keeps of a run while it goes on: for those who watch it (Live), and of its ranks' timelines
// (Tracing). Belong to the Job and its thread.

/// What the launcher knows of a run, for those who watch it: gathers what agents report and ranks print, and hands it
/// to live.json a few times a second.
class Live {
 public:
  struct Events {
    /// live.json cannot be written, and why.
    std::function<void(const std::string&)> on_trouble;
    /// How the run is, in a line; empty: there is nothing to say any more.
    std::function<void(std::string)> on_summary;
  };
  /// `folder` and `state` outlive this.
  Live(Loop& loop, const RunFolder& folder, const RunState& state, Events events);

  /// Ranks of the state's plan are about to be started.
  void begin_epoch();
  void take(const Reports& reports);
  void take(const Output& output);
  /// By its number in the plan's Roles; `well`: it has not failed.
  void process_ended(int process, bool well, const sys::ExitStatus& status);
  /// A server that has failed.
  void starts_again(int process);
  /// The state, too.
  void changed();
  /// At once.
  void write();

 private:
  /// As of now.
  LiveRun look() const;

  Loop& loop_;
  const RunState& state_;
  Events events_;
  Roles roles_;
  Figures figures_{0};
  std::vector<LastLine> lines_;
  std::vector<int> restarts_;  ///< by process: how often it has been started again, alone
  Timer soon_;
  LiveFile file_;
};

/// What the supervisor does for a trace (`--trace`): keeps what agents send of their ranks' timelines, and measures
/// their hosts' clocks against its own: when they come, each minute, and when their ranks end.
class Tracing {
 public:
  Tracing(Loop& loop, const std::string& run_folder, std::function<void(std::string)> on_trouble);

  void on_joined(AgentHandle& agent);
  /// True: it was for this.
  bool take(const AgentHandle& agent, const Message& message);
  /// Ranks of this agent begin to end.
  void on_ending(const AgentHandle& agent);
  /// Nothing more comes.
  void finish();

 private:
  void measure_again();

  Loop& loop_;
  TracePieces pieces_;
  std::map<int, std::unique_ptr<ClockSync>> clocks_;  ///< by host, of those that are elsewhere
  Timer again_;
};

class Epoch;

/// What lives as long as a job: its secret, store, port and agents, the display, the record, the signals.
class Job {
 public:
  Job(const JobSpec& spec, Plan plan, const std::function<void(const std::string&)>& on_trace);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  int run();

 private:
  friend class Epoch;
  using Clock = std::chrono::steady_clock;

  void prepare();
  void make_folders(const std::string& id);
  void start_agents();
  /// Once there is a job.json, which tells them how the job goes on.
  void start_trackers();
  AgentPool::Events agent_events();
  /// All agents are there: the plan is settled, and the first epoch can begin.
  void on_joined(AgentHandle& agent);
  /// Everybody has said how many ranks they want.
  Result<void> settle_nodes();
  /// To the owner, who brings it to the agents.
  void leave_invitation() const;
  /// What the plan decides.
  void look_at_plan();
  void on_signal(int signal);
  void on_no_room(int fd, int error);
  JobFacts facts_for(const AgentHandle& agent) const;
  /// Of a host, as seen from the others.
  std::string address_of(const AgentHandle& member) const;
  /// Each agent holds a port for each of its ranks. False: not yet, and those that do not were asked.
  bool have_ports();
  void take_ports(AgentHandle& agent, LeasedPorts leased);

  /// Of what has broken down: whether its ranks are started again, which `begin_next` does.
  Restarts::Decision after(const Breakdown& breakdown);
  void begin_next();
  /// Ranks of this epoch find each other apart from those before.
  void announce_epoch();
  /// Of this epoch, while ranks run: who waits for that server is told. "exit code 0 after 3.1 s".
  void tell_how_server_ended(int number, const std::string& how);
  /// For those who watch the run in a browser.
  void start_page();
  /// The last epoch has ended, and so has everything else: the rest of the output is shown.
  void end(int status);

  bool has_launchers() const { return setup_.plan.method == StartMethod::Launcher; }
  /// The plan is what agents say that they take.
  bool settles_late() const { return says_itself(setup_.plan.method); }
  bool owner_gone() const { return owner_ && owner_->gone(); }
  void say(const std::string& text);
  /// For those who watch the run.
  void note(const std::string& text);
  /// Where the logs of this epoch go; those of a restart lie below the first's. Empty: none are kept.
  std::string logs_below(const std::string& run_folder) const;
  std::string shown_logs() const { return logs_below(folder_.shown); }
  void write_record();

  const JobSpec& spec_;
  const std::function<void(const std::string&)>& on_trace_;
  JobSetup setup_;
  RunFolder folder_;
  LogFolder logs_;  ///< where they have a folder of their own
  RunState state_;
  Restarts restarts_;
  int server_restarts_ = 0;                 ///< that there have been
  std::optional<Clock::time_point> limit_;  ///< of all epochs together

  Loop loop_;
  sys::TerminalGuard terminal_{0};
  std::optional<sys::SignalFd> signals_;
  Watch signal_watch_;
  std::optional<Owner> owner_;
  std::optional<net::Secret> secret_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<PayloadTransferOptions> payload_transfer_;  ///< where the owner has something for ranks elsewhere
  std::optional<PortLease> port_;
  std::vector<pid_t> spared_;  ///< by what ends the job's processes
  std::optional<Tracing> tracing_;
  std::optional<AgentPool> agents_;
  Display display_;  ///< its sources are the agent pool's members
  Announcer announcer_;
  std::optional<Live> live_;          ///< once there is a folder
  std::optional<Warnings> warnings_;  ///< likewise
  std::optional<Trackers> trackers_;
  std::optional<SideCommand> page_;
  std::unique_ptr<Epoch> epoch_;
  Timer next_;  ///< the next epoch, once the last one is no longer on the stack
  int status_ = 1;
};

/// One start of a job's ranks: who takes part, how far they are, why they are stopped, and what is said of their end.
/// Belongs to its Job and uses what lives as long as that.
class Epoch {
 public:
  explicit Epoch(Job& job);

  // What the job tells it.
  void look_at_plan();
  void give_orders();
  void on_unfit(const AgentHandle* agent, const std::string& why);
  void on_message(AgentHandle& agent, Message message);
  void on_channel_closed(AgentHandle& agent, const std::optional<Error>& error);
  void on_agent_process_ended(AgentHandle& agent);
  void on_signal(int signal);
  void on_reader_gone();
  void on_owner_gone();
  void fail_start(const std::string& why);

  bool starting() const noexcept { return stage_ == Stage::Starting; }
  bool running() const noexcept { return stage_ == Stage::Running; }
  int stop_status() const noexcept { return end_.stop_status.value_or(1); }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { Starting, Running, Stopping, Ended };

  void on_agent_ends(AgentHandle& agent, const Ends& ends);
  void lose_agent(const std::string& what);
  void on_started(AgentHandle& agent, const Started& started);
  std::string start_text() const;
  void keep_words(const Ending& ending) const;
  void on_exited(const Exited& exited);
  /// A server that has failed, where the job may go on: it is started again, or gone on without.
  enum class Fate { Failed, Again, Without };
  Fate settle_fate(Ending& ending, int process);
  bool goes_on_without(AgentHandle& agent, const std::string& why);
  void on_started_again(const StartedAgain& started);
  AgentHandle& agent_of(int process) const;
  void look_for_failure();
  void look_for_requeue();
  void look_for_chief(const Exited& exited);
  void wait_for_cause();
  void stop_for_failure();
  void tell_failure();
  JobEnd how_it_ended() const;
  void on_stuck(const std::string& why);
  void on_agent_told(const AgentHandle& agent, const Told& told);
  void on_told(int signal, const std::string& reason);
  void pass_on(int signal);
  Stopping::Grace grace_after(int signal) const;
  void say(const std::string& text) { job_.say(text); }
  void stop(const std::string& reason, int signal, Stopping::Grace grace);
  Stopping::Events stopping_events();
  void before_stop();
  void tell_agents(int signal, Stopping::Grace grace);
  void on_host_failed(const AgentHandle& agent, const std::string& why);
  void fail_start_of_hosts();
  void check_end();
  Restarts::Decision restart_after() const;
  void bring_to_owner();
  void finish();
  int running_ranks() const { return running(Role::Worker); }
  int running(Role role) const;
  /// The first of the roles of which any process runs.
  Role running_role() const;
  bool has_ended(int process) const;
  std::string running_others() const;
  /// Once all ranks have ended: the servers are asked to, and after them the evaluator.
  void ask_next_role();

  Job& job_;
  const JobSpec& spec_ = job_.spec_;
  AgentPool& agents_;
  RunState& state_ = job_.state_;
  const std::string shown_logs_ = job_.shown_logs();
  const Milliseconds start_timeout_ = start_timeout_of(spec_, job_.setup_.plan);
  Stage stage_ = Stage::Starting;
  Stopping stopping_;
  std::unique_ptr<InputReader> input_;
  std::optional<RemoteLogs> remote_logs_;
  std::vector<std::string> hosts_;  ///< by process
  std::array<int, 3> ended_{};      ///< by role
  int lost_servers_ = 0;            ///< that the job goes on without
  std::map<int, Ending> again_;     ///< by process: the latest failure of a server that was to be started again,
  std::set<int> awaited_;           ///< and those of which it is not known yet whether they have been
  std::optional<HealthWatch> health_;
  JobEnd end_;                                 ///< what is known of it so far; the rest is in `how_it_ended`
  std::string lost_agent_;                     ///< where that is why the job ends
  std::string undelivered_;                    ///< why the owner lacks what its ranks have sent
  std::map<int, std::string> failed_hosts_;    ///< by index: why their agents do not come
  std::optional<Restarts::Decision> restart_;  ///< nothing runs any more
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
