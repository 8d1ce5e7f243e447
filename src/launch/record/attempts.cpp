#include "launch/record/attempts.h"

#include <fmt/format.h>

namespace cohort::launch {

std::string log_folder(const Attempts& attempts, const std::string& chosen, const std::string& run_folder) {
  std::string folder = chosen.empty() ? run_folder + "/logs" : chosen;
  if (attempts.restarts.done() > 0) folder += fmt::format("/restart-{}", attempts.restarts.done());
  return folder;
}

AttemptRecord attempt_of(const JobRecord& record) {
  AttemptRecord attempt;
  attempt.start = record.start;
  attempt.end = record.end;
  attempt.exit_status = record.exit_status.value_or(1);
  attempt.reason = record.reason;
  attempt.log_folder = record.log_folder;
  attempt.pids = record.pids;
  attempt.failure = record.failure;
  return attempt;
}

}  // namespace cohort::launch
