// The process that a job belongs to (--owner): its end ends the job, and its private folder goes then, which it can no
// longer remove itself. Belongs to the supervisor's thread.
#pragma once

#include "launch/loop.h"
#include "sys/unique_fd.h"

#include <functional>
#include <string>

namespace cohort::launch {

class Owner {
 public:
  /// Throws cohort::Error (Unavailable) if `pid` is not this process's parent.
  Owner(Loop& loop, int pid, std::function<void()> on_gone);

  int pid() const noexcept { return pid_; }
  bool gone() const noexcept { return gone_; }

 private:
  int pid_;
  bool gone_ = false;
  sys::UniqueFd process_;
  Watch watch_;
};

/// Removes a folder that is this user's alone (0700); leaves any other.
void remove_private_folder(const std::string& path);

}  // namespace cohort::launch
