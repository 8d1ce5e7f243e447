// How far a run is, how long it still takes, and the latest of what it logs; from the lines of its record. Plain
// values, one thread.
#pragma once

#include "telemetry/record.h"

#include <functional>
#include <map>
#include <optional>
#include <string>

namespace cohort::track {

/// What of a run its progress follows from; read from lines in their order. Its end is known where the `start` line's
/// parameters have epochs or steps (epochs, num_epochs, max_epochs; steps, max_steps, total_steps, num_steps).
class RunProgress {
 public:
  void take(const RecordLine& line);
  /// In all; nullopt: the record does not say.
  std::optional<double> epochs() const noexcept { return epochs_; }
  std::optional<double> steps() const noexcept { return steps_; }
  /// Done, a fraction.
  std::optional<double> epoch() const noexcept { return epoch_; }
  /// 0 to 1; nullopt: where it ends is not known.
  std::optional<double> done() const;
  /// By what was done since the program was started or resumed last; nullopt: not known yet.
  std::optional<double> remaining_seconds() const;
  const std::map<std::string, double, std::less<>>& values() const noexcept { return values_; }

 private:
  std::optional<double> epochs_, steps_, epoch_, step_;
  double time_ = 0;
  std::optional<double> first_done_;
  double first_time_ = 0;
  bool ended_ = false;
  PointReader points_;
  std::map<std::string, double, std::less<>> values_;  ///< the latest of each name
};

}  // namespace cohort::track
