// From what a job's ranks said at their end to a Point. Pure; any thread.
#pragma once

#include "base/result.h"
#include "training/point.h"

#include "child_job.h"

#include <string>
#include <vector>

namespace cohort::app::training {

/// How samples are counted.
struct Counting {
  double per_rank = 0;  ///< samples of each rank and step
  double per_step = 0;  ///< or of all together; neither: steps are counted, or runs
};
Point point_of(const JobOutcome& outcome, int processes, int hosts, const Counting& counting);
/// "samples", "steps", "runs": what a Point of this outcome counts.
std::string unit_of(const JobOutcome& outcome, const Counting& counting);

/// The repetition with the median rate, with the rates of all. `points` is not empty.
Point median_of(std::vector<Point> points);

/// Where none of the program's waits could be seen: what its step takes longer than `alone`'s (with Scaling::PerStep:
/// than its share of that) is taken for them, divided as the operations' own time.
void estimate_split(Point& point, const Point& alone, Scaling scaling);

}  // namespace cohort::app::training
