// Looks whether a job that comes from another host finds here what it needs, before anything of it is started. Touches
// nothing but the run's folder. One thread.
#pragma once

#include "base/result.h"
#include "launch/messages.h"

namespace cohort::launch {

/// True if the run's folder was not here and has been made. Fails with Unavailable: the working folder or the program
/// is missing; Io: the run's folder cannot be made.
Result<bool> check_host(const StartJob& job);

}  // namespace cohort::launch
