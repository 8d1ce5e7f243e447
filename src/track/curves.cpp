#include "track/curves.h"

#include <cohort/track.h>

#include "base/result.h"
#include "sys/files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace cohort::track {
namespace {

struct Sample {
  double step = 0, epoch = 0, value = 0;
};

struct Track {
  std::vector<Sample> samples;

  void add(const nlohmann::json& event, std::string_view name) {
    const auto value = number_of(event, name);
    if (!value) return;
    const double nothing = std::numeric_limits<double>::quiet_NaN();
    samples.push_back(
        {number_of(event, "step").value_or(nothing), number_of(event, "epoch").value_or(nothing), *value});
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

std::string text_of(const nlohmann::json& event, std::string_view name) {
  const auto found = event.find(name);
  return found != event.end() && found->is_string() ? found->get<std::string>() : std::string();
}

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

}  // namespace

Figure figure_of(const RecordLines& record) {
  Track train_loss, test_loss, train_accuracy, test_accuracy;
  Track* const tracks[] = {&train_loss, &test_loss, &train_accuracy, &test_accuracy};
  std::string program = "run", when, job;
  std::vector<double> ranks;  // of each part of the run
  std::vector<nlohmann::json> resumes;
  for (const auto& event : record.events) {
    const std::string kind = text_of(event, "event");
    if (kind == "start") {
      if (const auto name = text_of(event, "program"); !name.empty()) program = name;
      job = text_of(event, "job");
      const double size = number_of(event, "world_size").value_or(1);
      if (ranks.empty() || ranks.back() != size) ranks.push_back(size);
    } else if (kind == "resume") {
      resumes.push_back(event);
      for (Track* track : tracks) track->forget_after(number_of(event, "step").value_or(0));
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
  const bool over_epochs = std::any_of(std::begin(tracks), std::end(tracks), [](const Track* track) {
    return std::any_of(track->samples.begin(), track->samples.end(),
                       [](const Sample& sample) { return std::isfinite(sample.epoch); });
  });

  Figure figure;
  figure.title = program + ": loss and accuracy";
  if (ranks.empty()) ranks.push_back(1);
  std::string sizes;
  for (const double size : ranks) sizes += fmt::format("{}{:.0f}", sizes.empty() ? "" : ", then ", size);
  figure.subtitle =
      fmt::format("{} {}{}{}", sizes, ranks.back() == 1 ? "process" : "processes", job.empty() ? "" : ", ", job);
  for (const auto& event : resumes) {
    if (const auto at = number_of(event, over_epochs ? "epoch" : "step")) figure.marks.push_back(*at);
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
  figure.panels.push_back(std::move(loss));

  Panel accuracy{.title = "Accuracy", .percent = true, .curves = {}, .note = {}};
  if (!train_accuracy.samples.empty()) {
    accuracy.curves.push_back(styled(train_accuracy.curve(over_epochs), "training", "#4c78a8", true));
  }
  Curve tested = styled(test_accuracy.curve(over_epochs), "test", "#e4763a", true);
  tested.markers = true;
  accuracy.note = best_of(tested, over_epochs);
  accuracy.curves.push_back(std::move(tested));
  figure.panels.push_back(std::move(accuracy));
  return figure;
}

void plot(const std::filesystem::path& record_file, const std::filesystem::path& svg_file) {
  const std::string svg = render_svg(figure_of(read_record(record_file)));
  value_or_throw(sys::write_file_atomically(svg_file.string(), svg));
}

}  // namespace cohort::track
