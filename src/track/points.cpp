#include "track/points.h"

#include <algorithm>
#include <array>
#include <limits>

namespace cohort::track {
namespace {

constexpr std::string_view kOperations = "operations/";

}  // namespace

bool is_known_event(std::string_view event) noexcept {
  constexpr std::array<std::string_view, 8> kEvents = {"metric", "step",   "epoch",     "communication",
                                                       "start",  "resume", "preempted", "end"};
  return std::find(kEvents.begin(), kEvents.end(), event) != kEvents.end();
}

void PointReader::read(const RecordLine& line, const std::function<void(const MetricPoint&)>& take) {
  step_ = line.integer("step").value_or(step_);
  time_ = line.time.value_or(time_);
  MetricPoint point{.name = {}, .value = 0, .step = step_, .time = time_, .rank = {}};
  const bool metric = line.event == "metric", communication = line.event == "communication";
  if (!metric && !communication && line.event != "step" && line.event != "epoch") return;
  if (metric) {
    const auto rank = line.integer("rank");
    if (rank && *rank >= 0 && *rank <= std::numeric_limits<int>::max()) point.rank = static_cast<int>(*rank);
  }
  for (const RecordLine::Field& field : line.fields) {
    const auto value = number_of(field);
    if (!value) continue;
    point.name = field.name;
    if (metric) {
      if (!point.name.starts_with(kValues)) continue;
      point.name.remove_prefix(kValues.size());
    } else if (communication) {
      if (point.name.starts_with(kOperations)) point.name.remove_prefix(kOperations.size());
      name_.assign("communication/").append(point.name);
      point.name = name_;
    } else if (point.name == "step") {
      continue;
    }
    point.value = *value;
    take(point);
  }
}

}  // namespace cohort::track
