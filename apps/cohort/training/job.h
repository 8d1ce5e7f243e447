// One job of the experiment: `cohort run` as a child, whose events are read to its end. For the main thread; the child
// ends with this process, and so does all that it has started.
#pragma once

#include "training/measured.h"

#include <chrono>
#include <string>
#include <vector>

namespace cohort::app::training {

struct JobRequest {
  std::vector<std::string> options;  ///< of `cohort run`: hosts and the like; variables (COHORT_RUN_...) give none
  std::vector<std::string> program;  ///< with its arguments
  int processes = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Throws Unavailable if it cannot be started, ends badly or does not end, Timeout if its time was over; with what it
/// said.
JobOutcome run_job(const JobRequest& request);

}  // namespace cohort::app::training
