// What happens once all ranks agree: sums (sums.h), and operations that only move data. Between hosts each byte goes
// once to each host that needs it. The functions run on all ranks, on the thread that runs the operation; memory that
// is needed aside is the context's.
#pragma once

#include "comm/hosts/context.h"
#include "comm/request.h"

#include <cstdint>
#include <vector>

namespace cohort::comm::hosts {

/// The operation that all have agreed on. `serving`: this rank has joined, and brings and gets nothing.
void execute(Context& context, const Request& request, bool serving);

// gathers.cpp; `bytes` is by rank.
void all_gather(Context& context, const void* input, void* output, const std::vector<std::int64_t>& bytes);
void gather(Context& context, const Request& request, const std::vector<std::int64_t>& bytes);
void scatter(Context& context, const Request& request, const std::vector<std::int64_t>& bytes);

}  // namespace cohort::comm::hosts
