// The values over steps that a line of a record holds, whatever its event: what sinks and pictures show.
#pragma once

#include "track/record_line.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace cohort::track {

struct MetricPoint {
  std::string_view name;
  double value = 0;
  std::int64_t step = 0;
  double time = 0;          ///< seconds since 1970
  std::optional<int> rank;  ///< of one rank alone
};

/// Whether a line of that event holds what the schema says; what others hold is shown nowhere.
bool is_known_event(std::string_view event) noexcept;

/// Reads lines in their order: what has no step of its own belongs to the last one. One thread.
class PointReader {
 public:
  /// Calls `take` for each number of a `metric`, `step`, `epoch` or `communication` line. Of `communication` the names
  /// begin with that: "communication/exposed_seconds", "communication/all_reduce/waited_seconds". What `take` gets
  /// points into `line`.
  void read(const RecordLine& line, const std::function<void(const MetricPoint&)>& take);

 private:
  std::int64_t step_ = 0;
  double time_ = 0;
  std::string name_;
};

}  // namespace cohort::track
