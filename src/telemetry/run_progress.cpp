#include "telemetry/run_progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace cohort::track {
namespace {

constexpr std::size_t kMostValues = 64;

/// What people call it among the parameters of a run.
std::optional<double> parameter(const RecordLine& line, std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    const auto value = line.number(fmt::format("parameters/{}", name));
    if (value && *value > 0 && std::isfinite(*value)) return value;
  }
  return std::nullopt;
}

std::optional<double> share(std::optional<double> part, std::optional<double> whole) {
  if (!part || !whole || !std::isfinite(*part)) return std::nullopt;
  return std::clamp(*part / *whole, 0.0, 1.0);
}

}  // namespace

void RunProgress::take(const RecordLine& line) {
  time_ = line.time.value_or(time_);
  if (line.event == "start") {
    epochs_ = parameter(line, {"epochs", "num_epochs", "max_epochs"});
    steps_ = parameter(line, {"steps", "max_steps", "total_steps", "num_steps"});
    ended_ = false;
  }
  if (line.event == "start" || line.event == "resume") first_done_.reset();
  if (line.event == "end") ended_ = true;
  if (const auto step = line.number("step")) step_ = step;
  if (const auto epoch = line.number("epoch")) epoch_ = epoch;
  if (const auto epoch = line.number("values/epoch")) epoch_ = epoch;
  points_.read(line, [this](const MetricPoint& point) {
    if (point.rank || point.name == "epoch" || point.name.starts_with("communication/")) return;
    const auto known = values_.find(point.name);
    if (known != values_.end()) {
      known->second = point.value;
    } else if (values_.size() < kMostValues) {
      values_.emplace(point.name, point.value);
    }
  });
  const auto now = done();
  if (now && !first_done_ && line.event != "start") {
    first_done_ = now;
    first_time_ = time_;
  }
}

std::optional<double> RunProgress::done() const {
  if (ended_) return 1;
  const auto by_epoch = share(epoch_, epochs_), by_step = share(step_, steps_);
  // An epoch that is counted once it is over says nothing during the first.
  return by_epoch && (*by_epoch > 0 || !by_step) ? by_epoch : by_step;
}

std::optional<double> RunProgress::remaining_seconds() const {
  const auto now = done();
  if (!now) return std::nullopt;
  if (*now >= 1) return 0;
  if (!first_done_ || *now <= *first_done_ || time_ <= first_time_) return std::nullopt;
  return (1 - *now) * (time_ - first_time_) / (*now - *first_done_);
}

}  // namespace cohort::track
