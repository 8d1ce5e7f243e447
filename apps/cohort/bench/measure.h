// The measurement: every row of a plan, on every rank of a world together.
#pragma once

#include "bench/plan.h"
#include "bench/row.h"

#include <cohort/communicator.h>

namespace cohort::app::bench {

/// InvalidArgument if there is no such rank among so many.
void check_root(const Plan& plan, int ranks);

/// Called by all ranks with the same plan; rank 0 emits a `world` event and then one `row` event for each row. Throws
/// what the communicator throws, InvalidArgument where the plan asks for what this world cannot do.
void run_plan(Communicator& comm, const Plan& plan, const Emit& emit);

}  // namespace cohort::app::bench
