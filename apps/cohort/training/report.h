// The experiment as a person reads it: a table, bars, and the same as a picture. Pure; any thread.
#pragma once

#include "sys/terminal.h"
#include "training/point.h"

#include <string>
#include <vector>

namespace cohort::app::training {

/// Points with the speed-up over the first, which has the fewest processes and hosts.
std::string table_of(const std::vector<Point>& points, const Workload& workload);
/// A bar for each point: as long as its speed-up, divided as a step of it is.
std::string bars_of(const std::vector<Point>& points, const sys::TextStyle& style);
/// The rate over processes, a curve for each number of hosts; and columns of the speed-up and of a step's time,
/// divided.
std::string svg_of(const std::vector<Point>& points, const Workload& workload, const std::string& subtitle);

}  // namespace cohort::app::training
