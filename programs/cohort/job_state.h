// Parses Slurm's answers about a job. Pure functions over the output of its commands, which may be any text.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort::app {

struct JobState {
  std::string word;  ///< Slurm's word for the state: "RUNNING"
  bool over = false;
  std::optional<int> status = {};  ///< exit status of an ended job, as a shell gives it; nullopt: not known
};

/// State from `scontrol -o show job JOB`.
JobState state_by_scontrol(const std::string& text);
/// State from `sacct -X -n -P -o State,ExitCode -j JOB`; nullopt if there is no accounting.
std::optional<JobState> state_by_sacct(const std::string& text);

}  // namespace cohort::app
