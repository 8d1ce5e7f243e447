// Which processors each rank of a host gets. Pure; any thread.
#pragma once

#include "base/result.h"

#include <vector>

namespace cohort::launch {

enum class Binding {
  None,  ///< the kernel places ranks as it likes
  Core,  ///< each rank keeps to a share of the cores, next to each other
};

/// The processors of each of `ranks` ranks: whole cores where there are enough of them, else processors. Fails with
/// InvalidArgument if some rank would have none.
Result<std::vector<std::vector<int>>> share_cores(const std::vector<std::vector<int>>& cores, int ranks);

/// Compute threads of each of `ranks` ranks that share so many cores; at least 1.
int threads_of(int cores, int ranks);

}  // namespace cohort::launch
