// The experiment as a person reads it: a table, bars, and the same as curves. Pure but for the environment that colours
// look at; any thread.
#pragma once

#include "training/point.h"

#include <string>
#include <vector>

namespace cohort::app::training {

/// Points with the speed-up over the first, which has the fewest processes and hosts.
std::string table_of(const std::vector<Point>& points, const Workload& workload);
/// A bar for each point: as long as its speed-up, divided as a step of it is.
std::string bars_of(const std::vector<Point>& points);
/// Speed-up and parts of a step over processes, a curve for each number of hosts.
std::string svg_of(const std::vector<Point>& points, const Workload& workload, const std::string& subtitle);

}  // namespace cohort::app::training
