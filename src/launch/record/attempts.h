// What the attempts of one job share: its name, its folder, how often it may be started again, and how the attempts
// before ended. Plain data of the supervisor's thread.
#pragma once

#include "launch/record/job_record.h"
#include "launch/record/run_folder.h"
#include "launch/watch/restarts.h"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

struct Attempts {
  explicit Attempts(int most) : restarts(most) {}
  Restarts restarts;
  std::string job_id;
  RunFolder folder;
  LogFolder logs;  ///< where they have a folder of their own
  std::vector<AttemptRecord> records;
  std::optional<std::chrono::steady_clock::time_point> limit;  ///< of the whole job
};

/// Where the logs of this attempt go: `chosen`, or logs/ in the run's folder; those of a restart in a folder below.
std::string log_folder(const Attempts& attempts, const std::string& chosen, const std::string& run_folder);

/// How the attempt that `record` tells of has ended.
AttemptRecord attempt_of(const JobRecord& record);

}  // namespace cohort::launch
