// The rows of a benchmark as curves. Pure; any thread.
#pragma once

#include "bench/row.h"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace cohort::app::bench {

/// SVG: for each collective a panel of times over sizes, and one of bus bandwidths if there is one collective only;
/// both axes logarithmic, a curve for each number of ranks, kind of memory, type and reduction.
std::string draw(const std::vector<Row>& rows, const nlohmann::json& machine);

}  // namespace cohort::app::bench
