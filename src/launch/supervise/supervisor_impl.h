// One attempt of a job, from its plan to its end: what `run_job` consists of. supervisor.cpp has its beginning and what
// its agents say, supervisor_end.cpp how it ends. One thread.
#pragma once

#include "launch/plan/port_lease.h"
#include "launch/record/attempts.h"
#include "launch/record/courier.h"
#include "launch/record/job_record.h"
#include "launch/record/remote_logs.h"
#include "launch/record/run_folder.h"
#include "launch/show/announcer.h"
#include "launch/show/display.h"
#include "launch/start/crew.h"
#include "launch/supervise/input_reader.h"
#include "launch/supervise/job_setup.h"
#include "launch/supervise/owner.h"
#include "launch/supervise/stopping.h"
#include "launch/supervise/supervisor.h"
#include "launch/watch/health_watch.h"
#include "launch/watch/verdict.h"
#include "net/secret.h"
#include "store/server.h"
#include "sys/signals.h"
#include "sys/terminal.h"

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

class Supervisor {
 public:
  Supervisor(const RunOptions& options, Attempts& attempts);
  int run();
  bool wants_restart() const noexcept { return restart_; }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { Starting, Running, Stopping, Ended };

  void prepare();
  void take_log_folder();
  /// What the plan decides: the display, the health watch, the record.
  void look_at_plan();
  /// Every node's launcher has said how many ranks it wants.
  Result<void> settle_nodes();
  bool has_launchers() const { return options_.remote.way == Way::Launcher; }
  Crew::Events crew_events();
  void start_agents();
  void on_joined(CrewMember& agent);
  JobFacts facts_for(const CrewMember& agent) const;
  void on_message(CrewMember& agent, Message message);
  void on_channel_closed(CrewMember& agent, const std::optional<Error>& error);
  void on_agent_process_ended(CrewMember& agent);
  void on_agent_ends(const Ends& ends);
  void on_started(CrewMember& agent, const Started& started);
  void on_exited(const Exited& exited);
  void look_for_failure();
  void look_for_requeue();
  void wait_for_cause();
  void stop_for_failure();
  void tell_failure();
  JobEnd how_it_ended() const;
  void on_stuck(const std::string& why);
  void on_signal(int signal);
  void on_agent_told(const CrewMember& agent, const Told& told);
  void on_told(int signal, const std::string& reason);
  void pass_on(int signal);
  Stopping::Grace grace_after(int signal) const;
  void on_reader_gone();
  void on_no_room(int fd, int error);
  void on_owner_gone();
  void say(const std::string& text) { announcer_.say(text); }
  std::string logs_below(const std::string& run_folder) const {
    return options_.keep_logs ? log_folder(attempts_, options_.output_folder, run_folder) : std::string();
  }
  void stop(const std::string& reason, int signal, Stopping::Grace grace);
  Stopping::Events stopping_events();
  void before_stop();
  void tell_agents(int signal, Stopping::Grace grace);
  void fail_start(const std::string& why);
  void on_host_failed(const CrewMember& agent, const std::string& why);
  void fail_start_of_hosts();
  void check_end();
  void bring_to_owner();
  void finish();
  void write_record();
  int running_ranks() const;

  const RunOptions& options_;
  Attempts& attempts_;
  JobSetup setup_;
  std::string job_id_;
  const RunFolder& folder_ = attempts_.folder;
  JobRecord record_;

  Loop loop_;
  sys::TerminalGuard terminal_{0};
  std::optional<sys::SignalFd> signals_;
  Watch signal_watch_;
  std::optional<Owner> owner_;
  std::optional<net::Secret> secret_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<CourierOptions> courier_;  ///< where the owner has something for ranks elsewhere
  std::optional<PortLease> port_;
  std::vector<pid_t> spared_;
  std::optional<Crew> crew_;
  Display display_;  ///< its sources are the crew's members
  Announcer announcer_;
  std::unique_ptr<InputReader> input_;
  std::optional<RemoteLogs> remote_logs_;
  std::vector<Ending> endings_;
  std::optional<HealthWatch> health_;
  std::vector<std::string> doing_then_;  ///< by rank: what it was doing when the first failure was seen

  Stage stage_ = Stage::Starting;
  Stopping stopping_;
  std::string start_failure_;
  std::string undelivered_;                  ///< why the owner lacks what its ranks have sent
  std::map<int, std::string> failed_hosts_;  ///< by index: why their agents do not come
  std::optional<int> stop_status_;           ///< the exit status, where it is not a rank's
  bool agent_lost_ = false;
  bool quiet_end_ = false;
  bool restart_ = false;
  bool told_to_end_ = false;
  bool told_by_agent_ = false;  ///< and not yet by a signal to this process
  int told_by_ = 0;             ///< the signal that the exit status is of
  bool stuck_ = false;
  Clock::time_point started_at_ = Clock::now();
  Timer start_limit_;
  Timer job_limit_;
  Timer cause_limit_;
  Timer requeue_limit_;             ///< for the others, once a rank has saved and ended
  std::vector<int> early_signals_;  ///< that came before ranks ran
  int cause_waits_ = 0;
  Timer tell_limit_;
  Timer other_hosts_;
};

}  // namespace cohort::launch
