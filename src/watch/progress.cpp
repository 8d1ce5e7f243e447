#include "watch/progress.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace cohort::watch {
namespace {

/// A speed is over so many seconds, or one step.
constexpr double kSpeedSeconds = 1;

}  // namespace

void Curve::add(double step, double value) {
  if (!std::isfinite(value) || !std::isfinite(step)) return;
  // The last one is where the curve is now; it stays only if it is far enough from the one before.
  if (points_.size() >= 2 && points_.back().step - points_[points_.size() - 2].step < spacing_) points_.pop_back();
  points_.push_back({step, value});
  if (points_.size() <= kMost) return;
  spacing_ = std::max((points_.back().step - points_.front().step) / (kMost / 2.0), spacing_);
  std::vector<Point> kept;
  for (const Point& point : points_) {
    if (kept.empty() || point.step - kept.back().step >= spacing_) kept.push_back(point);
  }
  if (kept.size() > kMost) kept.erase(kept.begin(), kept.end() - static_cast<std::ptrdiff_t>(kMost / 2));
  points_ = std::move(kept);
}

void Curve::forget_after(double step) {
  std::erase_if(points_, [step](const Point& point) { return point.step > step; });
}

void ProgressReader::take_step(double time, double step) {
  if (!speed_from_ || step < speed_from_->step) {
    speed_from_ = {time, step};
  } else if (time - speed_from_->time >= kSpeedSeconds && step > speed_from_->step) {
    progress_.speeds.add(step, (step - speed_from_->step) / (time - speed_from_->time));
    speed_from_ = {time, step};
  }
}

void ProgressReader::take_loss(const std::string& name, double value, double step) {
  progress_.loss_name = name;
  progress_.loss = value;
  progress_.losses.add(step, value);
}

void ProgressReader::take(const track::RecordLine& line) {
  run_.take(line);
  progress_.steps = run_.steps();
  progress_.epochs = run_.epochs();
  progress_.seconds_left = run_.remaining_seconds();
  progress_.epoch = run_.epoch().value_or(0);
  if (!std::isfinite(progress_.epoch)) progress_.epoch = 0;
  if (line.event == "start" || line.event == "resume") speed_from_.reset();
  const auto step = line.number("step");
  if (line.event == "resume") {
    if (step) {
      progress_.step = static_cast<std::int64_t>(std::clamp(*step, 0.0, 9e15));
      progress_.losses.forget_after(*step);
      progress_.speeds.forget_after(*step);
    }
    return;
  }
  if (!step || !std::isfinite(*step) || (line.event != "step" && line.event != "metric")) return;
  progress_.step = static_cast<std::int64_t>(std::clamp(*step, 0.0, 9e15));
  if (line.event == "step") {
    if (const auto rate = line.number("lr")) progress_.learning_rate = rate;
    if (const auto loss = line.number("train_loss")) take_loss("train_loss", *loss, *step);
  } else if (!line.find("rank")) {
    for (const track::RecordLine::Field& field : line.fields) {
      if (!field.name.starts_with("values/")) continue;
      const std::string name = field.name.substr(7);
      const auto value = track::number_of(field);
      if (!value) continue;
      if (name == "lr" || name == "learning_rate") progress_.learning_rate = value;
      // The first name that is a loss's is shown; train_loss of `step` lines goes before all.
      const bool is_loss = name == "loss" || name.find("loss") != std::string::npos;
      if (is_loss && (progress_.loss_name.empty() || progress_.loss_name == name)) take_loss(name, *value, *step);
    }
  }
  take_step(line.time.value_or(0), *step);
}

}  // namespace cohort::watch
