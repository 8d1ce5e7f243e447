#include "launch/plan/binding.h"

#include <algorithm>
#include <cstddef>

namespace cohort::launch {

Result<std::vector<std::vector<int>>> share_cores(const std::vector<std::vector<int>>& cores, int ranks) {
  std::vector<std::vector<int>> units = cores;
  const auto wanted = static_cast<std::size_t>(std::max(ranks, 1));
  if (units.size() < wanted) {
    units.clear();
    for (const auto& core : cores) {
      for (const int processor : core) units.push_back({processor});
    }
  }
  if (units.size() < wanted) {
    return fail(
        ErrorCode::InvalidArgument,
        "--bind core: {} ranks on this host, and {} processor{} that may be used; start fewer or leave --bind out",
        ranks, units.size(), units.size() == 1 ? "" : "s");
  }
  std::vector<std::vector<int>> shares(wanted);
  for (std::size_t rank = 0; rank < wanted; ++rank) {
    for (std::size_t i = rank * units.size() / wanted; i < (rank + 1) * units.size() / wanted; ++i) {
      shares[rank].insert(shares[rank].end(), units[i].begin(), units[i].end());
    }
    std::sort(shares[rank].begin(), shares[rank].end());
  }
  return shares;
}

int threads_of(int cores, int ranks) { return std::max(1, cores / std::max(ranks, 1)); }

}  // namespace cohort::launch
