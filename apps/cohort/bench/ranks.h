// The ranks of a benchmark: processes of this command, threads of it, or the job that it is part of. Whatever happens,
// no rank outlives the call. For the main thread only: it forks, so no other thread may be running.
#pragma once

#include "bench/plan.h"
#include "bench/row.h"

#include <cohort/communicator.h>

namespace cohort::app::bench {

/// Forks `ranks` processes, which die with this one. Throws the error of the rank that failed first, naming it; the
/// others get 5 s to end by themselves.
void run_on_processes(int ranks, const Plan& plan, const Emit& emit);
/// As threads of this process.
void run_on_threads(int ranks, const Plan& plan, const Emit& emit);

/// Whether a launcher has started this process as a rank. Throws InvalidArgument where it contradicts itself.
bool inside_a_job();
/// Joins that job. `emit` is called in its rank 0 only.
void run_in_job(const Plan& plan, const Emit& emit);

}  // namespace cohort::app::bench
