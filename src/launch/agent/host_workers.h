// The workers of one host, and everything that they start, until the last one is gone: started as the supervisor says,
// reported of, told to end, swept. One thread.
#pragma once

#include "base/process.h"
#include "launch/agent/agent.h"
#include "launch/agent/gpu_meter.h"
#include "launch/agent/upstream.h"
#include "launch/agent/worker.h"
#include "launch/agent/worker_launch.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "net/secret.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

class HostWorkers {
 public:
  /// All outlive this.
  HostWorkers(Loop& loop, Upstream& upstream, const AgentOptions& options, const net::Secret& secret)
      : loop_(loop), upstream_(upstream), options_(options), secret_(secret) {}

  /// Nothing runs: not yet, or not any more.
  bool idle() const noexcept { return stage_ == Stage::Waiting || stage_ == Stage::Finished; }
  bool waiting() const noexcept { return stage_ == Stage::Waiting; }
  bool running() const noexcept { return stage_ == Stage::Running; }
  bool finished() const noexcept { return stage_ == Stage::Finished; }
  bool empty() const noexcept { return workers_.empty(); }
  bool stopping() const noexcept { return epoch_.stopping; }
  bool elastic() const { return running() && launch_->job().elastic; }
  /// A rank saves when it is asked, or has.
  bool makes_room() const;
  /// SIGKILL does not end something, as was not known when it was asked last.
  bool take_stuck() noexcept { return std::exchange(stuck_, false); }

  void start(StartJob job);
  void start_again(StartAgain order);
  void go_on_without(int rank);
  void start_more(const WorkerPlan& plan);
  void stop(const StopWorkers& order);
  void kill_all();
  /// The supervisor is gone: ranks that save when they are asked get the time to.
  void save_alone();
  /// The ranks' common exit status since then: kRequeueStatus if all have saved. nullopt if they were not asked to.
  std::optional<int> status_alone() const noexcept { return status_alone_; }
  void kill(int rank);
  void give_input(const std::string& bytes) {
    if (!workers_.empty()) workers_.front()->give_input(bytes);
  }
  void announce(std::uint64_t epoch);
  void pass_on(int signal);
  void ask_stacks();
  /// Children have ended.
  void reap();
  /// After each step of the loop: no more is read than the supervisor takes.
  void look();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage { Waiting, Running, Sweeping, Finished };
  static constexpr std::chrono::milliseconds kReportEvery{400};

  /// State of one order to start workers.
  struct Epoch {
    /// Servers that have failed: what becomes of them, once the supervisor has said that they are started again.
    std::map<int, std::optional<StartAgain>> awaited = {};
    std::size_t alive = 0;
    bool stopping = false;
    std::set<pid_t> asked = {};                  ///< to end, of those that are in no worker's group
    std::map<int, Clock::time_point> left = {};  ///< ranks that have ended within a shell that goes on
    std::optional<Clock::time_point> grace_end = {};
    Clock::time_point started_at = {};
    Clock::time_point sweep_since = {};
    std::uint32_t swept = 0;
    std::optional<std::uint64_t> out_of_memory_before = {};
    std::uint64_t meetings = 0;  ///< of its workers, that the supervisor knows of
  };

  Result<void> start_workers();
  Result<std::unique_ptr<Worker>> start_confirmed(const WorkerPlan& plan, Worker::Log log);
  void forget_ended();
  /// The server of this number, if it has failed and what becomes of it is not settled; nullptr.
  Worker* awaiting(int rank);
  void start_those_again();
  /// By a process in its place.
  Result<void> replace(std::unique_ptr<Worker>& worker, const StartAgain& order);
  /// Kills the processes that an ended worker has left in its group.
  static void kill_group(pid_t group);
  void start_no_more();
  void ask_those_apart(const StopWorkers& order);
  void ask_what_is_left_of(const Worker& worker);
  void ask_those_around_ranks();
  /// Those of this role have had their time; where others run on, only they are killed.
  void end_of_grace(Role role);
  void on_reaped(pid_t pid, const sys::ExitStatus& status);
  void watch_for_dying();
  void report_exit(Worker& worker, const sys::ExitStatus& status);
  bool runs(Role role) const;
  void send_reports();
  void report_regularly();
  void sweep_further();
  void all_gone(const std::string& stuck);

  Loop& loop_;
  Upstream& upstream_;
  const AgentOptions& options_;
  const net::Secret& secret_;
  Stage stage_ = Stage::Waiting;
  Epoch epoch_;
  std::optional<WorkerLaunch> launch_;
  std::vector<std::unique_ptr<Worker>> workers_;
  const Clock::time_point made_at_ = Clock::now();
  bool paused_ = false;  ///< the supervisor has enough output to take
  bool stuck_ = false;
  std::optional<int> status_alone_;
  KeptSignals kept_signals_{loop_, workers_, upstream_};
  Timer grace_;
  Timer around_;  ///< shells around ranks that were asked alone are looked at
  Timer reports_;
  GpuMeter gpus_;
  Timer stacks_;
  Timer dying_;
  Timer sweeping_;
};

}  // namespace cohort::launch
