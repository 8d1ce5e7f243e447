// What `cohort run` would start, in words: the plan as a table, the exact command, and what each rank's environment
// gets over that of the command. Looks at this process and its files, starts nothing. One thread.
#pragma once

#include "launch/supervise/run_options.h"

#include <string>

namespace cohort::launch {

/// Whole lines. Throws cohort::Error on options that cannot be met, as `run_job` does.
std::string describe_job(const RunOptions& options);

}  // namespace cohort::launch
