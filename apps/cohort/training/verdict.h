// Why more hosts do, or do not, make a training faster, and what would: one sentence, computed from what was measured.
// Pure; any thread.
#pragma once

#include "training/point.h"

#include <string>
#include <vector>

namespace cohort::app::training {

/// What would make `more` (more hosts) faster than `fewer`, if the parts of a step behave as they were measured:
/// compute grows with the batch, the rest does not; time on the wire goes with its bytes. Where the work of a step is
/// not known, nothing follows.
struct Remedies {
  double batch_factor = 0;  ///< from this many times the batch on; 0: no batch helps
  double link_factor = 0;   ///< on a link this many times as fast; 0: no link helps
  bool half_bytes = false;  ///< with 16-bit floats on the wire, where it has not got them
};
Remedies remedies_of(const Point& fewer, const Point& more, const Workload& workload);

/// `points`: the medians, at least one.
std::string verdict_of(const std::vector<Point>& points, const Workload& workload);

/// "12.5 MB/s", "98 MB": three digits, powers of 1000.
std::string bytes_text(double bytes);
/// "8.2 s", "41 ms".
std::string seconds_text(double seconds);

}  // namespace cohort::app::training
