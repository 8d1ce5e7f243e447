// How far a training is, from its run record: step, loss, time left, and two curves that are thinned out as they grow.
// Takes lines in their order; plain values, one thread.
#pragma once

#include "track/run_progress.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::watch {

/// Values over steps, at most kMost of them, evenly spaced.
class Curve {
 public:
  static constexpr std::size_t kMost = 400;
  struct Point {
    double step = 0;
    double value = 0;
  };
  void add(double step, double value);
  void forget_after(double step);
  const std::vector<Point>& points() const noexcept { return points_; }

 private:
  std::vector<Point> points_;
  double spacing_ = 0;
};

struct Progress {
  std::int64_t step = 0;
  std::optional<double> steps;   ///< in all, where the record says so
  double epoch = 0;              ///< done, a fraction
  std::optional<double> epochs;  ///< in all
  std::string loss_name;
  std::optional<double> loss;
  std::optional<double> learning_rate;
  std::optional<double> seconds_left;  ///< at the pace since the last start
  Curve losses;
  Curve speeds;  ///< steps per second
};

class ProgressReader {
 public:
  void take(const track::RecordLine& line);
  const Progress& progress() const noexcept { return progress_; }

 private:
  struct Mark {
    double time = 0;
    double step = 0;
  };
  void take_step(double time, double step);
  void take_loss(const std::string& name, double value, double step);

  Progress progress_;
  track::RunProgress run_;
  std::optional<Mark> speed_from_;
};

}  // namespace cohort::watch
