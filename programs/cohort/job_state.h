// What schedulers answer when they are asked for a job. Pure functions over their commands' texts, which may be
// anything.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort::app {

struct JobState {
  std::string word;  ///< the scheduler's own: "RUNNING"
  bool over = false;
  std::optional<int> status = {};  ///< of a job that is over, as a shell gives it; nothing: not known
};

/// Of `scontrol -o show job JOB`.
JobState state_by_scontrol(const std::string& text);
/// Of `sacct -X -n -P -o State,ExitCode -j JOB`; nothing where it keeps none.
std::optional<JobState> state_by_sacct(const std::string& text);
/// Of `qstat -x -f JOB`: PBS Professional's text, or Torque's XML.
JobState state_by_qstat(const std::string& text);
/// Of `flux jobs -n -o "{status} {returncode}" JOB`.
JobState state_by_flux(const std::string& text);

}  // namespace cohort::app
