// What happens once all ranks of a host have come to an operation: which way it goes, and the whole of it. Every
// operation begins with a round (round.h): disagreement is refused by all ranks before any result is delivered. Then
//   inline      the payloads came with the descriptors and everyone takes what it needs: one wait
//   zero-copy   registered memory is read (and for reductions written) in place by all ranks
//   cross       other memory is read through the kernel (cross-memory attach), once
//   chunked     other memory goes through double buffers in the control memory, chunk by chunk
// The plan (plan.h) says which; all give the same bits. The functions run on all ranks, on the thread that runs
// operations. After a failure other than Mismatch the world has ended, and every further operation fails with the first
// cause.
#pragma once

#include "comm/local/context.h"
#include "comm/request.h"

#include <cohort/observer.h>

#include <chrono>

namespace cohort::comm::local {

/// All but the announcement of an operation. Throws Mismatch (and the context may be used again) or what ended the
/// world. `event`, if any, gets sequence, waiting time and whether staging copies were needed.
void complete(Context& context, const Request& request, CollectiveEvent* event);
/// Serves the others' operations until all ranks have joined; `patience` is for each of them. Gives the last.
int join(Context& context, std::chrono::milliseconds patience);
/// What all have agreed on.
void execute(Context& context, const Request& request, CollectiveEvent* event);

}  // namespace cohort::comm::local
