// SIGUSR1 and SIGUSR2 on their way to ranks. Where a program has no handler they would end it, and so they would any
// helper that a rank has started (a loader of data): only processes that have a use for the signal get it, and for a
// rank that has no such process, since it is still starting, it is kept until there is one. Belongs to the agent and
// its thread.
#pragma once

#include "launch/agent/worker.h"
#include "launch/loop.h"

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

class KeptSignals {
 public:
  /// `workers` is the agent's; `tell` takes what the user should know.
  KeptSignals(Loop& loop, const std::vector<std::unique_ptr<Worker>>& workers, std::function<void(std::string)> tell);

  /// To all workers.
  void pass_on(int signal);

 private:
  void look_again();

  Loop& loop_;
  const std::vector<std::unique_ptr<Worker>>& workers_;
  std::function<void(std::string)> tell_;
  std::set<std::pair<int, int>> kept_;  ///< signal, rank
  std::chrono::steady_clock::time_point since_;
  bool told_ = false;
  Timer again_;
};

}  // namespace cohort::launch
