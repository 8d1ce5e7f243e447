// Starts the workers of one order, and later restarts a server or adds a worker. One thread.
#pragma once

#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/agent/agent.h"
#include "launch/agent/trace_collector.h"
#include "launch/agent/upstream.h"
#include "launch/agent/worker.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/processes.h"
#include "net/secret.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Returns true if ranks run in this process's folder and environment.
inline bool brings_environment(const AgentOptions& options) { return options.ranks > 0 && !options.own; }

class WorkerLaunch {
 public:
  /// All arguments outlive this. `traces_base`: the same for all orders.
  WorkerLaunch(Loop& loop, Upstream& upstream, const AgentOptions& options, const net::Secret& secret,
               std::chrono::steady_clock::time_point traces_base)
      : loop_(loop), upstream_(upstream), options_(options), secret_(secret), traces_base_(traces_base) {}

  /// Checks that this host has everything that the order needs.
  Result<void> prepare(StartJob order);
  /// Forks a worker; `confirm` its program next.
  Result<std::unique_ptr<Worker>> start(const WorkerPlan& plan, Worker::Log log);

  const StartJob& job() const noexcept { return job_; }
  const Environment& environment() const noexcept { return environment_; }
  /// Returns the run's folder if this host made it. It is removed again if nothing was put into it.
  const std::string& made_folder() const noexcept { return made_folder_; }
  std::optional<TraceCollector>& traces() noexcept { return traces_; }

 private:
  void collect_traces();

  Loop& loop_;
  Upstream& upstream_;
  const AgentOptions& options_;
  const net::Secret& secret_;
  const std::chrono::steady_clock::time_point traces_base_;
  StartJob job_;
  std::string made_folder_;
  sys::UniqueFd secret_file_;
  sys::SpawnOptions program_;
  Environment environment_;
  std::vector<std::vector<int>> shares_;  ///< share of the cores, by local rank
  std::optional<TraceCollector> traces_;
};

}  // namespace cohort::launch
