#include "observe/watch/view.h"
#include "base/json.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>

namespace cohort::watch {
namespace {

/// A speed is measured over this many seconds, but over at least one step.
constexpr double kSpeedSeconds = 1;
/// Limit on the names of values that are shown.
constexpr std::size_t kMostNames = 40;

}  // namespace

void Curve::add(double step, double value) {
  if (!std::isfinite(value) || !std::isfinite(step)) return;
  // The last point is the curve's present end. It stays only if it is far enough from the previous point.
  if (points_.size() >= 2 && points_.back().step - points_[points_.size() - 2].step < spacing_) points_.pop_back();
  points_.push_back({step, value});
  if (points_.size() <= most_) return;
  spacing_ = std::max((points_.back().step - points_.front().step) / (static_cast<double>(most_) / 2), spacing_);
  std::vector<Point> kept;
  for (const Point& point : points_) {
    if (kept.empty() || point.step - kept.back().step >= spacing_) kept.push_back(point);
  }
  if (kept.size() > most_) kept.erase(kept.begin(), kept.end() - static_cast<std::ptrdiff_t>(most_ / 2));
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

bool add_value(std::vector<Logged>& all, std::string_view name, double value, double at) {
  auto found = std::find_if(all.begin(), all.end(), [name](const Logged& one) { return one.name == name; });
  if (found == all.end()) {
    if (all.size() >= kMostNames) return false;
    found = all.insert(all.end(), Logged{std::string(name)});
  }
  found->last = value;
  found->curve.add(at, value);
  return true;
}

void ProgressReader::take(const track::RecordLine& line) {
  run_.take(line);
  points_.read(line, [this](const track::MetricPoint& point) {
    if (!point.rank && point.name != "epoch" && !point.name.starts_with("communication/") &&
        !add_value(progress_.values, point.name, point.value, static_cast<double>(point.step)))
      left_out_.emplace(point.name);
  });
  progress_.left_out = left_out_.size();
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
      for (Logged& one : progress_.values) one.curve.forget_after(*step);
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
      // Shows the first name of a loss; train_loss of `step` lines has precedence.
      const bool is_loss = name == "loss" || name.find("loss") != std::string::npos;
      if (is_loss && (progress_.loss_name.empty() || progress_.loss_name == name)) take_loss(name, *value, *step);
    }
  }
  take_step(line.time.value_or(0), *step);
}

namespace {

using Json = nlohmann::ordered_json;
using launch::LiveHost;
using launch::RankFigures;

std::size_t rank_count(const LiveHost& host, const LiveRun& run) {
  const auto all = static_cast<long>(run.ranks.size());
  return static_cast<std::size_t>(std::clamp<long>(host.ranks, 0, std::max(0L, all - host.first_rank)));
}

bool is_sound(const LiveHost& host, const LiveRun& run) {
  return host.first_rank >= 0 && static_cast<std::size_t>(host.first_rank) <= run.ranks.size();
}

/// Returns "running" if all ranks are, else "2 failed, 6 running", with the rarest state first.
std::string joined_states(const std::map<std::string, int>& states) {
  if (states.size() == 1) return states.begin()->first;
  std::vector<std::pair<int, std::string>> ordered;
  for (const auto& [state, count] : states) ordered.emplace_back(count, state);
  std::sort(ordered.begin(), ordered.end());
  std::string text;
  for (const auto& [count, state] : ordered) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, state);
  return text;
}

LiveRank sum_of(const LiveHost& host, const LiveRun& run) {
  LiveRank sum;
  RankFigures& all = sum.figures;
  const std::size_t count = rank_count(host, run);
  if (count == 0) return sum;
  std::map<std::string, int> states;
  all.step = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < count; ++i) {
    const LiveRank& rank = run.ranks[static_cast<std::size_t>(host.first_rank) + i];
    const RankFigures& one = rank.figures;
    ++states[one.state];
    all.step = std::min(all.step, one.step);
    all.samples += std::min<std::int64_t>(one.samples, std::int64_t{1} << 48);
    all.samples_per_second += one.samples_per_second;
    all.steps_per_second += one.steps_per_second / static_cast<double>(count);
    all.exposed += one.exposed / static_cast<double>(count);
    all.waited += one.waited / static_cast<double>(count);
    all.waited_for = std::max(all.waited_for, one.waited_for);
    all.memory += std::min<std::uint64_t>(one.memory, std::uint64_t{1} << 48);
    all.cpu += one.cpu;
    if (sum.line.empty()) sum.line = rank.line;
  }
  all.state = joined_states(states);
  return sum;
}

Json curve_json(const Curve& curve) {
  Json points = Json::array();
  for (const Curve::Point& point : curve.points()) points.push_back({point.step, point.value});
  return points;
}

/// NaN has to be shown, but JSON has none, so it becomes a text.
Json number_json(double value) { return std::isfinite(value) ? Json(value) : Json(fmt::format("{}", value)); }

Json logged_json(const std::vector<Logged>& values) {
  Json all = Json::array();
  for (const Logged& one : values)
    all.push_back({{"name", one.name}, {"last", number_json(one.last)}, {"points", curve_json(one.curve)}});
  return all;
}

void read_curve(const Json& json, const char* name, Curve& curve) {
  if (!json.contains(name) || !json[name].is_array()) return;
  for (const Json& point : json[name]) {
    if (point.is_array() && point.size() == 2 && point[0].is_number() && point[1].is_number())
      curve.add(point[0].get<double>(), point[1].get<double>());
  }
}

}  // namespace

LiveRun by_host(const LiveRun& run) {
  LiveRun out = run;
  out.ranks.clear();
  for (const LiveHost& host : run.hosts) {
    if (is_sound(host, run))
      out.ranks.push_back(sum_of(host, run));
    else
      out.ranks.emplace_back();
  }
  return out;
}

LiveRun of_host(const LiveRun& run, std::size_t index) {
  LiveRun out = run;
  out.ranks.clear();
  if (index >= run.hosts.size() || !is_sound(run.hosts[index], run)) return out;
  const LiveHost& host = run.hosts[index];
  const auto first = run.ranks.begin() + host.first_rank;
  out.ranks.assign(first, first + static_cast<std::ptrdiff_t>(rank_count(host, run)));
  out.first_rank = host.first_rank;
  return out;
}

std::string host_of(const LiveRun& run, int rank) {
  const auto host = std::find_if(run.hosts.begin(), run.hosts.end(), [rank](const LiveHost& one) {
    return rank >= one.first_rank && rank - one.first_rank < one.ranks;
  });
  return host == run.hosts.end() ? std::string() : host->name;
}

std::string to_text(const View& view, Rows rows) {
  const Progress& progress = view.progress;
  Json head = {{"now", launch::seconds_now()},
               {"place", view.place},
               {"rows", rows == Rows::Hosts ? "hosts" : "ranks"},
               {"step", progress.step},
               {"epoch", progress.epoch},
               {"loss_name", progress.loss_name},
               {"losses", curve_json(progress.losses)},
               {"speeds", curve_json(progress.speeds)},
               {"usage", logged_json(progress.usage)},
               {"values", logged_json(progress.values)},
               {"left_out", progress.left_out},
               {"late", late_rank(view.run)},
               {"samples_per_second", samples_per_second(view.run)}};
  const auto add = [&head](const char* name, const std::optional<double>& value) {
    if (value) head[name] = *value;
  };
  add("steps", progress.steps);
  add("epochs", progress.epochs);
  add("lr", progress.learning_rate);
  add("seconds_left", progress.seconds_left);
  if (progress.loss) head["loss"] = number_json(*progress.loss);
  return json_text(head) + "\n" + launch::to_json(rows == Rows::Hosts ? by_host(view.run) : view.run);
}

Result<View> parse_view(std::string_view text) {
  const auto end = text.find('\n');
  if (end == std::string_view::npos) return fail(ErrorCode::Corrupt, "it is no view of a run");
  const Json head = parse_json_or_discard<Json>(text.substr(0, end));
  if (!head.is_object()) return fail(ErrorCode::Corrupt, "it is no view of a run");
  auto run = launch::parse_live_run(text.substr(end + 1));
  if (!run) return tl::unexpected(run.error());
  View view;
  view.run = *std::move(run);
  Progress& progress = view.progress;
  progress.step = static_cast<std::int64_t>(std::clamp(number_in(head, "step").value_or(0), 0.0, 9e15));
  progress.epoch = number_in(head, "epoch").value_or(0);
  view.now = number_in(head, "now").value_or(view.run.time);
  progress.steps = number_in(head, "steps");
  progress.epochs = number_in(head, "epochs");
  progress.learning_rate = number_in(head, "lr");
  progress.seconds_left = number_in(head, "seconds_left");
  progress.loss = number_in(head, "loss");
  if (!text_in(head, "loss").empty()) progress.loss = std::nan("");
  progress.loss_name = text_in(head, "loss_name");
  read_curve(head, "losses", progress.losses);
  read_curve(head, "speeds", progress.speeds);
  return view;
}

}  // namespace cohort::watch
