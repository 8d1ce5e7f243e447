// The words of `cohort bench`, checked and made a plan. Pure functions; any thread.
#pragma once

#include "bench/collective.h"

#include "base/result.h"

#include <string>
#include <vector>

namespace cohort::app::bench {

/// As the command line has them.
struct Words {
  std::vector<std::string> collectives;
  std::string ranks;  ///< "2,4,8"; empty: one for each core
  std::string least = "8", most = "64M", factor = "2";
  std::string sizes;  ///< instead of the three
  std::string dtypes = "float32", ops = "sum", memory = "arena", state = "hot";
  std::string device = "cpu", gpu_sums;  ///< no gpu_sums: what COHORT_GPU_SUMS says
};

/// "8", "4K", "64M", "1G" (powers of 1024); InvalidArgument names the text.
Result<std::size_t> parse_size(const std::string& text);
/// Every name, number and size of `words`; the other members of the plan keep their defaults.
Result<Plan> plan_of(const Words& words);
/// Numbers of ranks, 1 to 1024 each.
Result<std::vector<int>> parse_ranks(const std::string& text);

}  // namespace cohort::app::bench
