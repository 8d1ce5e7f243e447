#include "observe/plot/curves.h"

#include "base/files.h"
#include "base/result.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
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
    // An epoch's mean training loss is used only if no steps have logged losses.
    if (found_.of("train_loss").empty() && !epoch_losses_.empty()) {
      found_.values["train_loss"][-1] = std::move(epoch_losses_);
    }
    if (found_.sizes.empty()) found_.sizes.push_back(1);
    found_.damaged = record.damaged;
    return std::move(found_);
  }

 private:
  struct Clock {
    double now = kUnknown;  // time of the last line
    double origin = kUnknown;
    double seconds() const { return now - origin; }
  };

  void tick(const RecordLine& line) {
    const double time = line.time.value_or(clock_.now);
    if (std::isnan(clock_.origin)) clock_.origin = time;
    // Leaves out the time between the last line and a start, since nothing was trained.
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

  /// Places a warning where the run was then: few warnings have a step, and none has an epoch.
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
  /// Updates the position of the run from a line that has one.
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

namespace {

constexpr std::size_t kMostPanels = 16, kMostRanks = 8;
constexpr const char* kUsual[] = {"train_loss", "test_loss", "train_accuracy", "test_accuracy", "samples_per_second"};
constexpr const char* kWarned = "#d62728";

bool is_accuracy(std::string_view name) { return name == "train_accuracy" || name == "test_accuracy"; }
bool is_usual(std::string_view name) {
  return std::find(std::begin(kUsual), std::end(kUsual), name) != std::end(kUsual);
}

constexpr std::string_view kLoss = "_loss", kAccuracy = "_accuracy";
/// Returns whether the name is drawn in one of the first two panels.
bool has_place(std::string_view name) { return is_usual(name) || name.ends_with(kLoss) || name.ends_with(kAccuracy); }

const char* label_of(Over over) { return over == Over::Epoch ? "epoch" : over == Over::Step ? "step" : "seconds"; }

Curve curve_of(const std::vector<Sample>& samples, Over over) {
  Curve out;
  for (const Sample& sample : samples) {
    if (std::isfinite(sample.at(over))) out.points.push_back({sample.at(over), sample.value});
  }
  return out;
}

std::string shown(double value, bool percent) {
  return percent ? fmt::format("{:.2f} %", value * 100) : fmt::format("{:.4g}", value);
}

Curve styled(Curve curve, std::string name, std::string colour, bool percent) {
  curve.name = std::move(name);
  curve.colour = std::move(colour);
  if (!curve.points.empty()) curve.latest = shown(curve.points.back().y, percent);
  return curve;
}

std::string best_of(const Curve& curve, Over over) {
  const Point* best = nullptr;
  for (const Point& point : curve.points) {
    if (std::isfinite(point.y) && (best == nullptr || point.y > best->y)) best = &point;
  }
  if (best == nullptr || curve.points.size() < 2) return {};
  return fmt::format("best {:.2f} % at {} {:.4g}", best->y * 100, label_of(over), best->x);
}

void add_marks(Figure& figure, const RunSeries& run, Over over) {
  bool resumed = false, warned = false;
  for (const Happening& happening : run.happened) {
    const double at = happening.at.at(over);
    if (!std::isfinite(at)) continue;
    const bool warning = happening.kind == Happening::Kind::Warned;
    (warning ? warned : resumed) = true;
    figure.marks.push_back({.x = at, .colour = warning ? kWarned : "#bbbbbb", .text = happening.text});
  }
  if (resumed) figure.subtitle += "; dashed: where it was resumed";
  if (warned) figure.subtitle += fmt::format("; {}red: warnings", resumed ? "" : "dashed ");
}

/// Adds names like "valid_loss" beside those of training and test.
void add_of_kind(Panel& panel, const RunSeries& run, Over over, std::string_view kind) {
  for (const auto& [name, of_ranks] : run.values) {
    if (is_usual(name) || !name.ends_with(kind) || run.of(name).empty()) continue;
    panel.curves.push_back(styled(curve_of(run.of(name), over), name.substr(0, name.size() - kind.size()),
                                  colour_of(1 + panel.curves.size()), panel.percent));
    panel.curves.back().markers = true;
  }
}

/// Adds panels of the names that are neither losses nor accuracies.
void add_logged(Figure& figure, const RunSeries& run, Over over) {
  std::size_t panels = 0, names = 0;
  for (const auto& [name, of_ranks] : run.values) {
    const auto ranks =
        static_cast<std::size_t>(std::count_if(of_ranks.begin(), of_ranks.end(), [&, &its_name = name](const auto& of) {
          return of.first >= 0 || !has_place(its_name);
        }));
    if (ranks == 0) continue;
    ++names;
    if (panels == kMostPanels) continue;
    ++panels;
    Panel panel{.title = name, .percent = false, .curves = {}, .note = {}};
    panel.from_zero = name == "lr" || name == "learning_rate";
    for (const auto& [rank, samples] : of_ranks) {
      if (rank < 0 && has_place(name)) continue;
      if (panel.curves.size() == kMostRanks) {
        panel.note = fmt::format("{} of {} ranks", kMostRanks, ranks);
        break;
      }
      panel.curves.push_back(styled(curve_of(samples, over), rank < 0 ? name : fmt::format("rank {}", rank),
                                    colour_of(panel.curves.size()), false));
    }
    figure.panels.push_back(std::move(panel));
  }
  if (names > panels) figure.subtitle += fmt::format("; {} more names are not drawn", names - panels);
}

std::string sizes_of(const RunSeries& run) {
  std::string sizes;
  for (const double size : run.sizes) sizes += fmt::format("{}{:.0f}", sizes.empty() ? "" : ", then ", size);
  return fmt::format("{} {}", sizes, run.sizes.size() == 1 && run.sizes.back() == 1 ? "process" : "processes");
}

/// Returns the names of all runs, the usual ones first.
std::vector<std::string> names_of(const std::vector<NamedRun>& runs) {
  std::set<std::string> there;
  for (const NamedRun& run : runs) {
    for (const auto& [name, of_ranks] : run.run.values) {
      if (std::any_of(of_ranks.begin(), of_ranks.end(), [](const auto& of) { return !of.second.empty(); }))
        there.insert(name);
    }
  }
  std::vector<std::string> names;
  for (const char* const name : kUsual) {
    if (there.erase(name) > 0) names.emplace_back(name);
  }
  names.insert(names.end(), there.begin(), there.end());
  return names;
}

Over common_over(const std::vector<NamedRun>& runs) {
  return std::all_of(runs.begin(), runs.end(), [](const NamedRun& of) { return of.run.has(Over::Epoch); }) ? Over::Epoch
                                                                                                           : Over::Step;
}

/// Returns the last sample of the run, or the mean of the ranks' last samples.
std::optional<Sample> end_of(const RunSeries& run, const std::string& name) {
  if (const auto& samples = run.of(name); !samples.empty()) return samples.back();
  const auto found = run.values.find(name);
  if (found == run.values.end()) return std::nullopt;
  std::optional<Sample> mean;
  double ranks = 0;
  for (const auto& [rank, samples] : found->second) {
    if (samples.empty()) continue;
    const double before = mean ? mean->value : 0;
    mean = samples.back();
    mean->value += before;
    ++ranks;
  }
  if (mean) mean->value /= ranks;
  return mean;
}

/// Returns the value of the last sample up to `x`, which both runs have reached.
std::optional<double> value_at(const RunSeries& run, const std::string& name, double x, Over over) {
  std::optional<double> value;
  for (const Sample& sample : run.of(name)) {
    if (sample.at(over) <= x) value = sample.value;
  }
  return value;
}

std::string difference(double value, double first, bool percent) {
  if (!std::isfinite(value) || !std::isfinite(first)) return "-";
  if (percent) return fmt::format("{:+.2f} points", (value - first) * 100);
  if (first == 0) return fmt::format("{:+.4g}", value);
  return fmt::format("{:+.1f} %", (value - first) / std::abs(first) * 100);
}

}  // namespace

Figure figure_of(const RunSeries& run, std::optional<Over> wanted) {
  const Over over = wanted.value_or(run.has(Over::Epoch) ? Over::Epoch : Over::Step);
  Figure figure;
  figure.title = run.program;
  figure.subtitle = sizes_of(run) + (run.job.empty() ? "" : ", " + run.job);
  add_marks(figure, run, over);
  if (run.damaged > 0) figure.subtitle += fmt::format("; {} damaged lines of the record left out", run.damaged);
  figure.x_label = label_of(over);

  Panel loss{.title = "Loss", .percent = false, .curves = {}, .note = {}};
  Curve train = styled(curve_of(run.of("train_loss"), over), "training", colour_of(0), false);
  train.smooth = true;
  loss.curves.push_back(std::move(train));
  Curve test = styled(curve_of(run.of("test_loss"), over), "test", colour_of(1), false);
  test.markers = true;
  if (!test.points.empty()) loss.curves.push_back(std::move(test));
  add_of_kind(loss, run, over, kLoss);
  const auto is_empty = [](const Curve& curve) { return curve.points.empty(); };
  const bool nothing = run.values.empty();  // there are no values yet; the empty panels show that
  const auto wants = [&](const Panel& panel) {
    return nothing || !std::all_of(panel.curves.begin(), panel.curves.end(), is_empty);
  };
  if (wants(loss)) figure.panels.push_back(std::move(loss));

  Panel accuracy{.title = "Accuracy", .percent = true, .curves = {}, .note = {}};
  if (!run.of("train_accuracy").empty()) {
    accuracy.curves.push_back(styled(curve_of(run.of("train_accuracy"), over), "training", colour_of(0), true));
  }
  Curve tested = styled(curve_of(run.of("test_accuracy"), over), "test", colour_of(1), true);
  tested.markers = true;
  accuracy.note = best_of(tested, over);
  accuracy.curves.push_back(std::move(tested));
  add_of_kind(accuracy, run, over, kAccuracy);
  if (wants(accuracy)) figure.panels.push_back(std::move(accuracy));
  add_logged(figure, run, over);
  return figure;
}

Figure compare(const std::vector<NamedRun>& runs, std::optional<Over> wanted) {
  const Over over = wanted.value_or(common_over(runs));
  Figure figure;
  figure.title = fmt::format("{} runs", runs.size());
  figure.x_label = label_of(over);
  std::size_t damaged = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    figure.legend.push_back({fmt::format("{} ({})", runs[i].name, sizes_of(runs[i].run)), colour_of(i)});
    damaged += runs[i].run.damaged;
  }
  figure.subtitle = over == Over::Time ? "over the time that they have run" : fmt::format("over {}s", label_of(over));
  if (damaged > 0) figure.subtitle += fmt::format("; {} damaged lines of the records left out", damaged);
  for (const std::string& name : names_of(runs)) {
    if (figure.panels.size() == kMostPanels) {
      figure.subtitle += "; more names are not drawn";
      break;
    }
    Panel panel{.title = name, .percent = is_accuracy(name), .curves = {}, .note = {}};
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto found = runs[i].run.values.find(name);
      if (found == runs[i].run.values.end()) continue;
      std::size_t ranks = 0;
      for (const auto& [rank, samples] : found->second) {
        if (rank >= 0 && ++ranks > kMostRanks) break;
        Curve curve = curve_of(samples, over);
        curve.colour = colour_of(i);
        curve.smooth = name == "train_loss";
        curve.markers = !curve.smooth && rank < 0;
        panel.curves.push_back(std::move(curve));
      }
    }
    figure.panels.push_back(std::move(panel));
  }
  return figure;
}

std::string sparkline(const std::vector<double>& values, std::size_t width, bool unicode) {
  constexpr const char* kBlocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr const char* kPlain[] = {"_", ".", ":", "-", "=", "+", "*", "#"};
  std::vector<double> finite;
  std::copy_if(values.begin(), values.end(), std::back_inserter(finite),
               [](double value) { return std::abs(value) < 1e300; });
  if (finite.empty() || width == 0) return {};
  std::vector<double> means;
  const std::size_t parts = std::min(width, finite.size());
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t begin = part * finite.size() / parts, end = (part + 1) * finite.size() / parts;
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += finite[i] / static_cast<double>(end - begin);
    means.push_back(sum);
  }
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string out;
  for (const double mean : means) {
    const double share = *high > *low ? (mean - *low) / (*high - *low) : 0;
    const auto level = std::min<std::size_t>(static_cast<std::size_t>(share * 8), 7);
    out += unicode ? kBlocks[level] : kPlain[level];
  }
  return out;
}

std::string end_values(const std::vector<NamedRun>& runs, const sys::TextStyle& style, std::optional<Over> wanted) {
  constexpr std::size_t kCourse = 32;
  const Over over = wanted.value_or(common_over(runs));
  const std::vector<std::string> names = names_of(runs);
  std::size_t name_width = 4, run_width = 3;
  for (const std::string& name : names) name_width = std::max(name_width, name.size());
  for (const NamedRun& run : runs) run_width = std::max(run_width, run.name.size());
  const bool several = runs.size() > 1;
  std::string out = fmt::format("{:<{}}  {:<{}}  {:>9}  {:>10}  {}course\n", "name", name_width, "run", run_width,
                                label_of(over), "end value", several ? fmt::format("{:>18}  ", "difference") : "");
  for (const std::string& name : names) {
    const bool percent = is_accuracy(name);
    std::optional<Sample> first;
    const RunSeries* first_run = nullptr;
    std::string title = name;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto end = end_of(runs[i].run, name);
      if (!end) continue;
      std::vector<double> values;
      for (const Sample& sample : runs[i].run.of(name)) values.push_back(sample.value);
      std::string course = sparkline(values, kCourse, style.unicode);
      if (style.colour) course = fmt::format("\033[{}m{}\033[0m", 31 + i % 6, course);
      std::string apart;
      if (first) {
        const double x = std::min(end->at(over), first->at(over));
        const bool same = end->at(over) == first->at(over) || !std::isfinite(x);
        const auto mine = same ? end->value : value_at(runs[i].run, name, x, over);
        const auto theirs = same ? first->value : value_at(*first_run, name, x, over);
        apart = mine && theirs ? difference(*mine, *theirs, percent) : "-";
        if (!same && apart != "-") apart += fmt::format(" at {:.4g}", x);
      }
      if (several) apart = fmt::format("{:>18}  ", apart);
      out += fmt::format("{:<{}}  {:<{}}  {:>9}  {:>10}  {}{}\n", std::exchange(title, ""), name_width, runs[i].name,
                         run_width, std::isfinite(end->at(over)) ? fmt::format("{:.5g}", end->at(over)) : "-",
                         shown(end->value, percent), apart, course);
      if (!first) {
        first = end;
        first_run = &runs[i].run;
      }
    }
  }
  return out;
}

void plot(const std::filesystem::path& record_file, const std::filesystem::path& svg_file) {
  const std::string svg = render_svg(figure_of(series_of(read_run(record_file))));
  value_or_throw(sys::write_file_atomically(svg_file.string(), svg));
}

}  // namespace cohort::track
