// The lines that `cohort run` says itself while a job goes its way. Pure; any thread.
#pragma once

#include "launch/plan/plan.h"

#include <string>

namespace cohort::launch {

struct StartNotice {
  const Plan& plan;
  int threads = 0;  ///< of each rank; 0: not known
  bool bound = false;
  int cores = 0;           ///< that this process may use, where its host has more ranks than that
  std::string run_folder;  ///< empty: not worth a word
  bool launchers = false;  ///< one on each host, whose -np counts there
};
/// "4 processes on 1 host (a: ranks 0-3), 2 threads each, run runs/..."
std::string to_string(const StartNotice& notice);

struct StopNotice {
  std::string reason;  ///< why the job is being ended; empty where that was said before
  int ranks = 0;       ///< still running
  std::string others;  ///< where no rank is: "servers 0-1"
  double seconds_left = 0;
  int next_signal = 0;
  bool at_terminal = false;  ///< somebody there can press Ctrl-C
};
/// "told to end by SIGINT; 3 ranks still running, 4 s until SIGTERM; Ctrl-C again: now"
std::string to_string(const StopNotice& notice);

/// What is said when nobody reads the rest of a job's output.
struct UnreadNotice {
  double seconds = 0;
  std::string log_folder;  ///< empty: there are no logs
};
std::string to_string(const UnreadNotice& notice);

}  // namespace cohort::launch
