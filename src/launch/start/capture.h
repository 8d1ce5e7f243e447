// Asks a program for its version: runs it, takes what it prints, and gives up on it after a while. Nothing that it has
// started in its own process group outlives the call. One thread; not for a process that reaps children by itself.
#pragma once

#include "base/result.h"

#include <chrono>
#include <string>
#include <vector>

namespace cohort::launch {

struct Captured {
  int status = 0;    ///< as a shell gives it
  std::string text;  ///< stdout and stderr, at most 1 MiB
};

/// `command` is a name that is searched in PATH, or a path, and its arguments. Fails with Unavailable if it is not
/// there or cannot be started, with Timeout if it has not ended within `limit`.
Result<Captured> capture(const std::vector<std::string>& command, std::chrono::milliseconds limit);

}  // namespace cohort::launch
