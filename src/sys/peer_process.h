// Watching a process that is not our child: is it alive, dying or gone? Knows it by pid and start time, so that a
// reused pid is not mistaken for it. Also which cores this process may use. Not thread-safe.
#pragma once

#include "base/result.h"
#include "sys/unique_fd.h"

#include <sys/types.h>

#include <array>
#include <cstdint>

namespace cohort::sys {

struct ProcessId {
  pid_t pid = 0;
  std::uint64_t start_time = 0;  ///< clock ticks since boot, as in /proc/PID/stat
};

ProcessId own_process();

class PeerProcess {
 public:
  /// Nothing to watch; `gone` is then always false.
  PeerProcess() = default;
  explicit PeerProcess(ProcessId id);

  pid_t pid() const noexcept { return id_.pid; }
  /// True once the process is exiting or has ended. After SIGKILL the kernel frees memory first, and end-of-file on
  /// sockets and pidfds wait for that; the PF_EXITING flag shows within milliseconds, so this looks at that. Needs no
  /// descriptor but its own: a process that has run out of them does not take the living for dead.
  bool gone() const;

 private:
  ProcessId id_;
  UniqueFd stat_;  // of /proc/PID/stat: it stays this process's, whoever has its pid later
};

/// Cores that this process may run on.
using CoreSet = std::array<std::uint64_t, 16>;
CoreSet allowed_cores();
int count(const CoreSet& cores);

}  // namespace cohort::sys
