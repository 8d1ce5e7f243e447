// The ranks of a benchmark: a job of this command's own, threads of it, or the job that it is part of. Whatever
// happens, no rank outlives the call. For the main thread.
#pragma once

#include "bench/plan.h"
#include "bench/row.h"

#include <cohort/communicator.h>

namespace cohort::app::bench {

/// Processes on this host, each of this command with its own words behind `kAsRank`. Throws what `run_job` does.
void run_on_processes(int ranks, const Emit& emit);
inline constexpr const char* kAsRank = "--as-rank";
/// One of them: what rank 0 emits goes to stdout.
void be_rank(const Plan& plan);
/// As threads of this process.
void run_on_threads(int ranks, const Plan& plan, const Emit& emit);

/// Whether a launcher has started this process as a rank. Throws InvalidArgument where it contradicts itself.
bool inside_a_job();
/// Joins that job. `emit` is called in its rank 0 only.
void run_in_job(const Plan& plan, const Emit& emit);

}  // namespace cohort::app::bench
