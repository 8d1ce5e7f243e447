#include "track/curves.h"

#include <cohort/track.h>

#include "base/result.h"
#include "sys/files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>

namespace cohort::track {
namespace {

struct Sample {
  double step = 0, epoch = 0, value = 0;
};

struct Track {
  std::vector<Sample> samples;

  void add(const RecordLine& event, std::string_view name) {
    if (const auto value = event.number(name)) add(event, *value, "epoch");
  }
  void add(const RecordLine& event, double value, std::string_view epoch) {
    const double nothing = std::numeric_limits<double>::quiet_NaN();
    samples.push_back({event.number("step").value_or(nothing), event.number(epoch).value_or(nothing), value});
  }
  bool has_epochs() const {
    return std::any_of(samples.begin(), samples.end(), [](const Sample& of) { return std::isfinite(of.epoch); });
  }
  void forget_after(double step) {
    std::erase_if(samples, [step](const Sample& sample) { return sample.step > step; });
  }
  Curve curve(bool over_epochs) const {
    Curve out;
    for (const Sample& sample : samples) {
      const double x = over_epochs ? sample.epoch : sample.step;
      if (std::isfinite(x)) out.points.push_back({x, sample.value});
    }
    return out;
  }
};

Curve styled(Curve curve, std::string name, std::string colour, bool percent) {
  curve.name = std::move(name);
  curve.colour = std::move(colour);
  if (!curve.points.empty()) {
    const double last = curve.points.back().y;
    curve.latest = percent ? fmt::format("{:.2f} %", last * 100) : fmt::format("{:.4g}", last);
  }
  return curve;
}

std::string best_of(const Curve& curve, bool over_epochs) {
  const Point* best = nullptr;
  for (const Point& point : curve.points) {
    if (std::isfinite(point.y) && (best == nullptr || point.y > best->y)) best = &point;
  }
  if (best == nullptr || curve.points.size() < 2) return {};
  return fmt::format("best {:.2f} % at {} {:.4g}", best->y * 100, over_epochs ? "epoch" : "step", best->x);
}

/// What was logged by `metric` lines, under other names than those of losses and accuracies.
class Logged {
 public:
  /// `usual` takes what has a panel of its own; nullptr: this does.
  void add(const RecordLine& event, const std::function<Track*(std::string_view)>& usual) {
    const auto rank = event.integer("rank");
    for (const RecordLine::Field& field : event.fields) {
      const auto value = number_of(field);
      if (!value || !field.name.starts_with(kValues) || field.name == kEpoch) continue;
      const std::string name = field.name.substr(kValues.size());
      Track* track = rank ? nullptr : usual(name);
      if (track == nullptr) track = &tracks_[name][rank.value_or(-1)];
      track->add(event, *value, kEpoch);
    }
  }
  void forget_after(double step) {
    for (auto& [name, of_ranks] : tracks_) {
      for (auto& [rank, track] : of_ranks) track.forget_after(step);
    }
  }
  bool empty() const { return tracks_.empty(); }
  bool has_epochs() const {
    for (const auto& [name, of_ranks] : tracks_) {
      for (const auto& [rank, track] : of_ranks) {
        if (!track.has_epochs()) return false;
      }
    }
    return true;
  }
  void draw(Figure& figure, bool over_epochs) const;

 private:
  static constexpr std::string_view kValues = "values/", kEpoch = "values/epoch";
  std::map<std::string, std::map<std::int64_t, Track>> tracks_;  // by name and rank; -1: of the run
};

void Logged::draw(Figure& figure, bool over_epochs) const {
  constexpr std::size_t kMostPanels = 16;
  std::size_t panels = 0;
  for (const auto& [name, of_ranks] : tracks_) {
    if (++panels > kMostPanels) break;
    Panel panel{.title = name, .percent = false, .curves = {}, .note = {}};
    for (const auto& [rank, track] : of_ranks) {
      if (panel.curves.size() == kColours) {
        panel.note = fmt::format("{} of {} ranks", panel.curves.size(), of_ranks.size());
        break;
      }
      panel.curves.push_back(styled(track.curve(over_epochs), rank < 0 ? name : fmt::format("rank {}", rank),
                                    colour_of(panel.curves.size()), false));
    }
    figure.panels.push_back(std::move(panel));
  }
  if (tracks_.size() > kMostPanels) {
    figure.subtitle += fmt::format("; {} more names are not drawn", tracks_.size() - kMostPanels);
  }
}

}  // namespace

Figure figure_of(const RecordLines& record) {
  Track train_loss, test_loss, train_accuracy, test_accuracy;
  Track* const tracks[] = {&train_loss, &test_loss, &train_accuracy, &test_accuracy};
  Logged logged;
  const auto usual = [&](std::string_view name) -> Track* {
    if (name == "loss" || name == "train_loss") return &train_loss;
    if (name == "test_loss" || name == "val_loss") return &test_loss;
    if (name == "accuracy" || name == "train_accuracy") return &train_accuracy;
    if (name == "test_accuracy" || name == "val_accuracy") return &test_accuracy;
    return nullptr;
  };
  std::string program = "run", job;
  std::vector<double> ranks;  // of each part of the run
  std::vector<RecordLine> resumes;
  for (const auto& event : record.events) {
    const std::string& kind = event.event;
    if (kind == "start") {
      if (const auto name = event.text("program"); !name.empty()) program = name;
      job = event.text("job");
      const double size = event.number("world_size").value_or(1);
      if (ranks.empty() || ranks.back() != size) ranks.push_back(size);
    } else if (kind == "resume") {
      resumes.push_back(event);
      for (Track* track : tracks) track->forget_after(event.number("step").value_or(0));
      logged.forget_after(event.number("step").value_or(0));
    } else if (kind == "metric") {
      logged.add(event, usual);
      continue;
    }
    // An epoch's own mean of the training loss would only repeat what the steps say.
    if (kind == "step") train_loss.add(event, "train_loss");
    test_loss.add(event, "test_loss");
    train_accuracy.add(event, "train_accuracy");
    test_accuracy.add(event, "test_accuracy");
  }
  if (train_loss.samples.empty()) {
    for (const auto& event : record.events) train_loss.add(event, "train_loss");
  }
  const bool over_epochs =
      logged.has_epochs() && (!logged.empty() || std::any_of(std::begin(tracks), std::end(tracks),
                                                             [](const Track* of) { return of->has_epochs(); }));

  Figure figure;
  figure.title = program + ": loss and accuracy";
  if (ranks.empty()) ranks.push_back(1);
  std::string sizes;
  for (const double size : ranks) sizes += fmt::format("{}{:.0f}", sizes.empty() ? "" : ", then ", size);
  figure.subtitle =
      fmt::format("{} {}{}{}", sizes, ranks.back() == 1 ? "process" : "processes", job.empty() ? "" : ", ", job);
  for (const auto& event : resumes) {
    if (const auto at = event.number(over_epochs ? "epoch" : "step")) figure.marks.push_back(*at);
  }
  if (!figure.marks.empty()) figure.subtitle += "; dashed: where it was resumed";
  if (record.damaged > 0) figure.subtitle += fmt::format("; {} damaged lines of the record left out", record.damaged);
  figure.x_label = over_epochs ? "epoch" : "step";

  Panel loss{.title = "Loss", .percent = false, .curves = {}, .note = {}};
  Curve train = styled(train_loss.curve(over_epochs), "training", "#4c78a8", false);
  train.smooth = true;
  loss.curves.push_back(std::move(train));
  Curve test = styled(test_loss.curve(over_epochs), "test", "#e4763a", false);
  test.markers = true;
  if (!test.points.empty()) loss.curves.push_back(std::move(test));
  const auto is_empty = [](const Curve& curve) { return curve.points.empty(); };
  const auto wanted = [&](const Panel& panel) {
    return logged.empty() || !std::all_of(panel.curves.begin(), panel.curves.end(), is_empty);
  };
  if (wanted(loss)) figure.panels.push_back(std::move(loss));

  Panel accuracy{.title = "Accuracy", .percent = true, .curves = {}, .note = {}};
  if (!train_accuracy.samples.empty()) {
    accuracy.curves.push_back(styled(train_accuracy.curve(over_epochs), "training", "#4c78a8", true));
  }
  Curve tested = styled(test_accuracy.curve(over_epochs), "test", "#e4763a", true);
  tested.markers = true;
  accuracy.note = best_of(tested, over_epochs);
  accuracy.curves.push_back(std::move(tested));
  if (wanted(accuracy)) figure.panels.push_back(std::move(accuracy));
  logged.draw(figure, over_epochs);
  return figure;
}

void plot(const std::filesystem::path& record_file, const std::filesystem::path& svg_file) {
  const std::string svg = render_svg(figure_of(read_record(record_file)));
  value_or_throw(sys::write_file_atomically(svg_file.string(), svg));
}

}  // namespace cohort::track
