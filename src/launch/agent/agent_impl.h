// What one host's agent consists of, behind `run_agent`: agent.cpp has how it begins and what it is told, and its
// guard; agent_start.cpp how it starts its workers, agent_end.cpp how they end, how it ends them, and their timelines.
// One thread.
#pragma once

#include "base/memory.h"
#include "base/process.h"
#include "base/signals.h"
#include "base/unique_fd.h"
#include "launch/agent/agent.h"
#include "launch/agent/gpu_meter.h"
#include "launch/agent/worker.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/secure_connection.h"
#include "telemetry/timeline.h"
#include "telemetry/trace_encoder.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

/// The timelines of one host's ranks, on their way to the supervisor: drained a few times a second and once more when
/// nothing runs any more, as packets of Perfetto's format. If the supervisor does not keep up, the rings fill and their
/// oldest events are lost, which the trace says; the ranks never wait.
class TraceCollector {
 public:
  struct Options {
    status::HostTrace host;
    std::uint16_t epoch = 0;
    std::int64_t base_ns = 0;  ///< the same for all epochs
    std::function<void(TracePiece)> send;
    std::function<bool()> has_room;  ///< the supervisor takes what was sent before
  };
  TraceCollector(Loop& loop, Options options);

  /// The ring of a rank that is about to be started, for it to inherit. Fails with Unavailable.
  Result<int> add(int rank);
  /// From now on.
  void begin() { wait(); }
  /// All that there is; nothing writes any more.
  void finish() { drain(status::TimelineReader::Until::End); }

 private:
  struct Rank {
    sys::SharedSegment ring;
    status::TimelineReader reader;
    std::unique_ptr<status::RankTrace> trace;  ///< once there is something to write
    std::uint64_t told_lost = 0;
    int rank = 0;
  };
  void wait();
  void drain(status::TimelineReader::Until until);
  void drain(Rank& rank, status::TimelineReader::Until until, std::string& out) const;
  void note_clocks(std::string& out);

  Loop& loop_;
  const Options options_;
  std::int64_t clocks_noted_ns_ = 0;
  std::vector<Rank> ranks_;
  Timer again_;
};

/// What this host's workers are started with, once more too.
struct WorkerLaunch {
  StartJob job;
  sys::UniqueFd secret_file;
  sys::SpawnOptions program;
  Environment environment;
  std::vector<std::vector<int>> shares;  ///< of cores, by local rank
};

/// Of one order to start workers.
struct AgentEpoch {
  using Clock = std::chrono::steady_clock;
  std::string run_folder;  ///< made here, so removed if nothing was put into it
  std::optional<WorkerLaunch> launch;
  /// Servers that have failed: what becomes of them, once the supervisor has said that they are started again.
  std::map<int, std::optional<StartAgain>> awaited;
  std::optional<TraceCollector> traces;
  std::size_t alive = 0;
  bool paused = false;
  bool stopping = false;
  std::set<pid_t> asked = {};                  ///< to end, of those that are in no worker's group
  std::map<int, Clock::time_point> left = {};  ///< ranks that have ended within a shell that goes on
  std::optional<Clock::time_point> grace_end;
  Clock::time_point started_at;
  Clock::time_point sweep_since;
  std::uint32_t swept = 0;
  std::optional<std::uint64_t> out_of_memory_before;
  std::uint64_t meetings = 0;  ///< of its workers, that the supervisor knows of
  bool passed_on = false;      ///< the supervisor knows that somebody told us to end
  int told_times = 0;          ///< a launcher, by a signal that is for the job
};

class Agent {
 public:
  /// `saves` says to the guard that ranks save without a supervisor.
  Agent(const AgentOptions& options, net::Secret secret, std::atomic<bool>& saves);
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage { Waiting, Running, Sweeping, Finished };
  static constexpr std::chrono::milliseconds kReportEvery{400};

  /// To the supervisor; throws where that cannot be. False: there is nothing more to do.
  bool come();
  Result<net::SecureConnection> find_supervisor();
  std::optional<int> told_while_waiting();
  void say(const std::string& text) const;
  /// "node 1", once it is known which.
  std::string own_name() const;
  std::chrono::milliseconds pause();
  void on_message(Message message);
  void on_closed(std::optional<Error> error);
  void on_signal();
  bool told_to_make_room(int signal);
  bool told_as_launcher(int signal);
  void pass_on(int signal);
  void start_job(StartJob job);
  Result<void> prepare_launch(StartJob order);
  Result<void> start_workers();
  std::unique_ptr<Worker> new_worker(const WorkerPlan& plan);
  Result<void> start_worker(Worker& worker, const WorkerPlan& plan, Worker::Log log);
  void start_again(StartAgain order);
  void go_on_without(int rank);
  void start_more(const WorkerPlan& plan);
  void forget_ended();
  /// The server of this number, if it has failed and what becomes of it is not settled; nullptr.
  Worker* awaiting(int rank);
  void start_those_again();
  /// By a process in its place.
  Result<void> replace(std::unique_ptr<Worker>& worker, const StartAgain& order);
  /// What a worker that has ended has left in its group.
  static void kill_group(pid_t group);
  void start_no_more();
  void collect_traces(const StartJob& job);
  void stop(const StopWorkers& order);
  void ask_those_apart(const StopWorkers& order);
  void ask_what_is_left_of(const Worker& worker);
  void ask_those_around_ranks();
  /// Those of this role have had their time; where others run on, only they are killed.
  void end_of_grace(Role role);
  void kill_all();
  /// The supervisor is gone: ranks that save when they are asked get the time to.
  void save_alone();
  void on_reaped(pid_t pid, const sys::ExitStatus& status);
  void reap();
  void watch_for_dying();
  void report_exit(Worker& worker, const sys::ExitStatus& status);
  bool makes_room() const;
  bool runs(Role role) const;
  bool brings_environment() const { return options_.ranks > 0 && !options_.own; }
  void send_reports();
  void report_regularly();
  void ask_stacks();
  void lease_ports(int count);
  void forward(Output output);
  void sweep_further();
  void all_gone(const std::string& stuck);

  const AgentOptions& options_;
  int host_index_;
  net::Secret secret_;
  const pid_t guard_ = ::getppid();
  Loop loop_;
  sys::SignalFd signals_;
  Watch signal_watch_;
  net::Deadline deadline_;  ///< for the supervisor to take this agent
  std::minstd_rand random_{static_cast<unsigned>(::getpid())};
  Timer again_;  ///< it is tried
  std::unique_ptr<Channel> channel_;
  std::optional<PortLease> port_;  ///< MASTER_PORT, where the supervisor cannot hold it
  std::vector<PortLease> leases_;  ///< what ranks are told to listen at
  Stage stage_ = Stage::Waiting;
  std::optional<AgentEpoch> epoch_{std::in_place};
  std::vector<std::unique_ptr<Worker>> workers_;
  const Clock::time_point made_at_ = Clock::now();
  std::size_t unacknowledged_ = 0;
  bool lost_supervisor_ = false;
  std::atomic<bool>& saves_;  ///< since then
  KeptSignals kept_signals_{loop_, workers_, [this](std::string text) { channel_->send(Trouble{std::move(text)}); }};
  Timer grace_;
  Timer around_;  ///< shells around ranks that were asked alone are looked at
  Timer reports_;
  GpuMeter gpus_;
  Timer stacks_;
  Timer dying_;
  Timer sweeping_;
  int exit_status_ = 0;
  std::optional<Clock::time_point> told_at_;  ///< when it was
};

}  // namespace cohort::launch
