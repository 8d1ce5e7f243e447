// From what `cohort run --json` said of a job's ranks to a Point. Pure; any thread. The lines come from our own
// command, but hold what programs wrote, so nothing in them is trusted to be there.
#pragma once

#include "base/result.h"
#include "training/point.h"

#include <string>
#include <vector>

namespace cohort::app::training {

/// A rank at its end.
struct RankTimes {
  int rank = 0;
  std::string host;
  double steps = 0, seconds = 0;
  double busy = 0, waited = 0, wire = 0, exposed = 0;  ///< seconds
  double wire_bytes = 0;
};

/// What a job said.
struct JobOutcome {
  int exit_status = -1;  ///< -1: there was no end
  double seconds = 0;
  std::vector<RankTimes> ranks;
  std::string failure;  ///< in words
};

class JobReader {
 public:
  void take(const std::string& line);
  JobOutcome finish() &&;

 private:
  JobOutcome outcome_;
  std::vector<std::string> last_lines_;
  std::string notice_;
};

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
