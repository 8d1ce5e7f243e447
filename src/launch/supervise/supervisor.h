// `cohort run`: makes the plan, has an agent placed on every host, tells them what to start, shows the output, and ends
// the job as soon as anything in it has failed. It owns the job's store and its lock on MASTER_PORT. It touches workers
// only through their agents.
#pragma once

#include "launch/supervise/run_options.h"

namespace cohort::launch {

/// Exit statuses that are not a rank's.
inline constexpr int kTimeoutStatus = 124;
inline constexpr int kCannotStartStatus = 127;

/// Throws InvalidArgument where the hosts have too few places for the processes wanted.
void check_places(const RunOptions& options);

/// Runs the job to its end. Returns the exit status as a shell gives it: 0; the first failing rank's code, or 128 +
/// signal; kRequeueStatus once all have ended with it; 124 after `timeout`; 127 if the program could not be started;
/// 128 + signal if this process was told to end. Throws cohort::Error where nothing was started. Blocks signals and
/// adopts orphans for this process: call it from a process that does nothing else, before it has a second thread.
int run_job(const RunOptions& options);

/// The part of a job that `options.node` is: of rank 0 the job, once the others can find it; else this node's ranks, to
/// the job's end, whose exit status it returns. Likewise for the rest.
int run_node(RunOptions options);

}  // namespace cohort::launch
