// The workers of one host, and everything that they start, until the last process is gone: starts them as the
// supervisor orders, reports on them, tells them to end, and kills what is left. One thread.
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

/// Time in which ranks may save after the supervisor is gone.
inline constexpr std::chrono::duration<std::uint32_t, std::milli> kTimeAlone{10'000};

class HostWorkers {
 public:
  /// All arguments outlive this.
  HostWorkers(Loop& loop, Upstream& upstream, const AgentOptions& options, const net::Secret& secret)
      : loop_(loop), upstream_(upstream), options_(options), secret_(secret) {}

  /// Returns true if nothing runs yet, or nothing runs any more.
  bool idle() const noexcept { return stage_ == Stage::Waiting || stage_ == Stage::Finished; }
  bool waiting() const noexcept { return stage_ == Stage::Waiting; }
  bool running() const noexcept { return stage_ == Stage::Running; }
  bool finished() const noexcept { return stage_ == Stage::Finished; }
  bool empty() const noexcept { return workers_.empty(); }
  bool stopping() const noexcept { return epoch_.stopping; }
  bool elastic() const { return running() && launch_->job().elastic; }
  /// Returns true if a rank would save if it were asked to end, or has already saved.
  bool makes_room() const;
  /// Returns true if SIGKILL does not end some process, and this was not known at the last call.
  bool take_stuck() noexcept { return std::exchange(stuck_, false); }

  void start(StartJob job);
  void start_again(StartAgain order);
  void go_on_without(int rank);
  void start_more(const WorkerPlan& plan);
  void stop(const StopWorkers& order);
  void kill_all();
  /// Called when the supervisor is gone: gives ranks that save when they are asked the time to do so.
  void save_alone();
  /// Returns the ranks' common exit status since `save_alone`: kRequeueStatus if all have saved; nullopt if not called.
  std::optional<int> status_alone() const noexcept { return status_alone_; }
  /// Returns true if a rank of this attempt has saved and ended because the whole job ends.
  bool have_saved() const noexcept { return epoch_.saved; }
  void kill(int rank);
  void give_input(const std::string& bytes) {
    if (!workers_.empty()) workers_.front()->give_input(bytes);
  }
  void announce(std::uint64_t epoch);
  void pass_on(int signal);
  void ask_stacks();
  /// Called when children have ended.
  void reap();
  /// To be called after each step of the loop: reads no more output than the supervisor takes.
  void look();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage { Waiting, Running, Sweeping, Finished };
  static constexpr std::chrono::milliseconds kReportEvery{400};

  /// State of one order to start workers.
  struct Epoch {
    /// Failed servers that await a decision, each with its order once the supervisor has decided to start it again.
    std::map<int, std::optional<StartAgain>> awaited = {};
    std::size_t alive = 0;
    bool stopping = false;
    bool saved = false;                          ///< a rank has saved because the whole job ends
    std::set<pid_t> asked = {};                  ///< processes outside all workers' groups that have been asked to end
    std::map<int, Clock::time_point> left = {};  ///< ranks that have ended, while the shell around them goes on
    std::optional<Clock::time_point> grace_end = {};
    Clock::time_point started_at = {};
    Clock::time_point sweep_since = {};
    std::uint32_t swept = 0;
    std::optional<std::uint64_t> out_of_memory_before = {};
    std::uint64_t meetings = 0;  ///< sum of the workers' meetings() that the supervisor knows of
  };

  Result<void> start_workers();
  Result<std::unique_ptr<Worker>> start_confirmed(const WorkerPlan& plan, Worker::Log log);
  void forget_ended();
  /// Returns the failed server of this number if its restart is not decided yet; else nullptr.
  Worker* awaiting(int rank);
  void start_those_again();
  /// Replaces the worker by a new process.
  Result<void> replace(std::unique_ptr<Worker>& worker, const StartAgain& order);
  /// Kills the processes that an ended worker has left in its group.
  static void kill_group(pid_t group);
  void start_no_more();
  void ask_those_apart(const StopWorkers& order);
  void ask_what_is_left_of(const Worker& worker);
  void ask_those_around_ranks();
  /// Ends the grace of this role's processes; if other roles run on, only these processes are killed.
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
  bool paused_ = false;  ///< the supervisor has enough output for now
  bool stuck_ = false;
  std::optional<int> status_alone_;
  KeptSignals kept_signals_{loop_, workers_, upstream_};
  Timer grace_;
  Timer around_;  ///< for shells around ranks that were asked to end without their group
  Timer reports_;
  GpuMeter gpus_;
  Timer stacks_;
  Timer dying_;
  Timer sweeping_;
};

}  // namespace cohort::launch
