// Ends everything that descends from this process. Works only for a process that adopts its orphans
// (sys::become_subreaper): then no descendant can slip away, not by fork, not by setsid, and "no child left" proves
// that no descendant is left. One thread of a process may use it.
#pragma once

#include "sys/process.h"

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace cohort::launch {

/// It descends from this process.
bool is_ours(pid_t pid);

/// A child that has been reaped.
using OnReaped = std::function<void(pid_t, const sys::ExitStatus&)>;

/// Reaps all children that have ended. Returns false when there is no child at all, running or ended.
bool reap_children(const OnReaped& on_reaped);

struct SweepStep {
  bool clean = false;  ///< nothing is left but `spared` and what descends from it
  int killed = 0;      ///< processes that were sent SIGKILL in this step
};
/// Reaps, and sends SIGKILL to every descendant that is not spared. Call it again, after a moment, until it is clean.
SweepStep sweep_once(std::span<const pid_t> spared, const OnReaped& on_reaped);

/// Sweeps until clean or `longest` has passed. Returns what is left.
std::vector<pid_t> sweep(std::span<const pid_t> spared, std::chrono::milliseconds longest, const OnReaped& on_reaped);

/// "pid 4711 (python3 train.py), in state D at nfs_wait": for processes that SIGKILL does not end.
std::string describe_stuck(std::span<const pid_t> pids);

}  // namespace cohort::launch
