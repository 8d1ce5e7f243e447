// Lists of numbers as people write them: "0,3-5". Pure; any thread.
#pragma once

#include "base/result.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort {

/// Ascending, each once. Fails with InvalidArgument on anything else than numbers below `limit`, commas and ranges.
Result<std::vector<int>> parse_ranges(std::string_view text, int limit);

/// "0-2,5" for {0, 1, 2, 5}; takes them in ascending order.
std::string to_ranges(const std::vector<int>& numbers);

}  // namespace cohort
