#include "track/series.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace cohort::track {
namespace {

constexpr std::string_view kEpoch = "values/epoch";
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

std::string usual_name(std::string_view name) {
  if (name == "loss") return "train_loss";
  if (name == "val_loss") return "test_loss";
  if (name == "accuracy") return "train_accuracy";
  if (name == "val_accuracy") return "test_accuracy";
  return std::string(name);
}

class SeriesReader {
 public:
  RunSeries read(const RecordLines& record) {
    for (const RecordLine& line : record.events) take(line);
    // An epoch's own mean of the training loss would only repeat what the steps say.
    if (found_.of("train_loss").empty() && !epoch_losses_.empty()) {
      found_.values["train_loss"][-1] = std::move(epoch_losses_);
    }
    if (found_.sizes.empty()) found_.sizes.push_back(1);
    found_.damaged = record.damaged;
    return std::move(found_);
  }

 private:
  struct Clock {
    double now = kUnknown;  // of the last line
    double origin = kUnknown;
    double seconds() const { return now - origin; }
  };

  void tick(const RecordLine& line) {
    const double time = line.time.value_or(clock_.now);
    if (std::isnan(clock_.origin)) clock_.origin = time;
    // Nobody trained between the last line and this one.
    if (line.event == "start" && !std::isnan(clock_.now)) clock_.origin += time - clock_.now;
    clock_.now = time;
  }

  void take(const RecordLine& line) {
    tick(line);
    const std::string& kind = line.event;
    if (kind != "warning") follow(line);
    if (kind == "start") {
      if (const auto name = line.text("program"); !name.empty()) found_.program = name;
      found_.job = line.text("job");
      const double size = line.number("world_size").value_or(1);
      if (found_.sizes.empty() || found_.sizes.back() != size) found_.sizes.push_back(size);
    } else if (kind == "resume") {
      found_.happened.push_back({Happening::Kind::Resumed, sample(line, 0, "epoch"), "resumed"});
      forget_after(line.number("step").value_or(0));
    } else if (kind == "warning") {
      return take_warning(line);
    } else if (kind == "metric") {
      return take_logged(line);
    } else if (kind == "epoch") {
      add(line, "samples_per_second");
    }
    if (kind == "step") {
      add(line, "train_loss");
    } else if (const auto loss = line.number("train_loss")) {
      epoch_losses_.push_back(sample(line, *loss, "epoch"));
    }
    for (const char* const name : {"test_loss", "train_accuracy", "test_accuracy"}) add(line, name);
  }

  /// It stands where the run was then: only few of them know a step, and none an epoch.
  void take_warning(const RecordLine& line) {
    Sample at = last_;
    at.seconds = clock_.seconds();
    if (const auto step = line.number("step"); step && !std::isfinite(at.step)) at.step = *step;
    found_.happened.push_back({Happening::Kind::Warned, at, std::string(line.text("text"))});
  }

  void take_logged(const RecordLine& line) {
    const auto rank = line.integer("rank");
    for (const RecordLine::Field& field : line.fields) {
      const auto value = number_of(field);
      if (!value || !field.name.starts_with(kValues) || field.name == kEpoch) continue;
      std::string name(field.name.substr(kValues.size()));
      if (!rank) name = usual_name(name);
      found_.values[name][rank.value_or(-1)].push_back(sample(line, *value, kEpoch));
    }
  }

  void add(const RecordLine& line, const char* name) {
    if (const auto value = line.number(name)) found_.values[name][-1].push_back(sample(line, *value, "epoch"));
  }
  Sample sample(const RecordLine& line, double value, std::string_view epoch) const {
    return {.step = line.number("step").value_or(kUnknown),
            .epoch = line.number(epoch).value_or(kUnknown),
            .seconds = clock_.seconds(),
            .value = value};
  }
  /// How far the run was by the last line that said so.
  void follow(const RecordLine& line) {
    if (const auto step = line.number("step")) last_.step = *step;
    if (const auto epoch = line.number("epoch")) last_.epoch = *epoch;
    if (const auto epoch = line.number(kEpoch)) last_.epoch = *epoch;
  }
  void forget_after(double step) {
    const auto later = [step](const Sample& of) { return of.step > step; };
    std::erase_if(epoch_losses_, later);
    for (auto& [name, of_ranks] : found_.values) {
      for (auto& [rank, samples] : of_ranks) std::erase_if(samples, later);
    }
  }

  RunSeries found_;
  std::vector<Sample> epoch_losses_;
  Clock clock_;
  Sample last_{.step = kUnknown, .epoch = kUnknown, .seconds = kUnknown, .value = 0};
};

}  // namespace

const std::vector<Sample>& RunSeries::of(const std::string& name) const {
  static const std::vector<Sample> kNone;
  const auto found = values.find(name);
  if (found == values.end()) return kNone;
  const auto of_run = found->second.find(-1);
  return of_run == found->second.end() ? kNone : of_run->second;
}

bool RunSeries::has(Over what) const {
  bool any = false;
  for (const auto& [name, of_ranks] : values) {
    for (const auto& [rank, samples] : of_ranks) {
      if (samples.empty()) continue;
      any = true;
      if (std::none_of(samples.begin(), samples.end(), [what](const Sample& of) { return std::isfinite(of.at(what)); }))
        return false;
    }
  }
  return any;
}

RunSeries series_of(const RecordLines& record) { return SeriesReader().read(record); }

}  // namespace cohort::track
