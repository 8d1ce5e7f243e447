// What lives as long as a job, however often its ranks are started: its secret, store, port and agents, the display,
// the record, the signals. Who takes part now, and how that ends, is an Epoch's, of which there is one at a time; a
// restart is another epoch with the same agents. One thread.
#pragma once

#include "launch/plan/rank_environment.h"
#include "launch/record/job_record.h"
#include "launch/record/other_hosts.h"
#include "launch/record/run_folder.h"
#include "launch/show/announcer.h"
#include "launch/show/display.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/job_setup.h"
#include "launch/supervise/live.h"
#include "launch/supervise/owner.h"
#include "launch/supervise/side_command.h"
#include "launch/supervise/tracing.h"
#include "launch/supervise/trackers.h"
#include "launch/supervise/warnings.h"
#include "launch/watch/verdict.h"
#include "net/secret.h"
#include "store/server.h"
#include "sys/signals.h"
#include "sys/terminal.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

class Epoch;

class Job {
 public:
  explicit Job(const RunOptions& options);
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
  AgentPool::Events crew_events();
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

  bool has_launchers() const { return options_.remote.method == StartMethod::Launcher; }
  /// The plan is what agents say that they take.
  bool settles_late() const { return says_itself(options_.remote.method); }
  bool owner_gone() const { return owner_ && owner_->gone(); }
  void say(const std::string& text);
  /// Where the logs of this epoch go; those of a restart lie below the first's. Empty: none are kept.
  std::string logs_below(const std::string& run_folder) const;
  std::string shown_logs() const { return logs_below(folder_.shown); }
  void write_record();

  const RunOptions& options_;
  JobSetup setup_;
  std::string id_;
  RunFolder folder_;
  LogFolder logs_;  ///< where they have a folder of their own
  JobRecord record_;
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

}  // namespace cohort::launch
