// The values of a run over its steps, by name, as pictures and tables of it show them. Values and pure functions; any
// thread may use them.
// From runs to a figure of their curves, and to a table of their end values. Pure: any thread may call.
#pragma once

#include "base/terminal.h"
#include "telemetry/record.h"
#include "train/track/figure.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::track {

/// Axis that values stand over; time is that of the run, without what passed between its end and its being resumed.
enum class Over { Epoch, Step, Time };

/// NaN: not known.
struct Sample {
  double step = 0, epoch = 0, seconds = 0, value = 0;
  double at(Over what) const noexcept { return what == Over::Epoch ? epoch : what == Over::Step ? step : seconds; }
};

/// Something that happened to the run.
struct Happening {
  enum class Kind { Resumed, Warned } kind = Kind::Resumed;
  Sample at = {};  ///< without a value
  std::string text = {};
};

struct RunSeries {
  std::string program = "run", job;
  std::vector<double> sizes;  ///< ranks, of each part of the run
  /// By name, and by rank where they are of one rank alone; -1: of the run. Losses and accuracies have one name each,
  /// however the program calls them: train_loss, test_loss, train_accuracy, test_accuracy.
  std::map<std::string, std::map<std::int64_t, std::vector<Sample>>> values;
  std::vector<Happening> happened;
  std::size_t damaged = 0;  ///< lines

  /// Samples of the run; empty if there are none.
  const std::vector<Sample>& of(const std::string& name) const;
  /// Whether every value can stand over this.
  bool has(Over what) const;
};

/// After a `resume` at step S, what earlier lines say of later steps counts no more: it was done again.
RunSeries series_of(const RecordLines& record);

/// Losses and accuracies, and a panel for each other name that was logged; by default over epochs, or over steps where
/// the record has no epochs.
Figure figure_of(const RunSeries& run, std::optional<Over> over = {});

struct NamedRun {
  std::string name;
  RunSeries run;
};

/// Likewise of several runs: a panel for each name, in it a curve for each run.
Figure compare(const std::vector<NamedRun>& runs, std::optional<Over> over = {});

/// A line for each name and run: what it ended with, how far that is from the first run's, and its course in small.
std::string end_values(const std::vector<NamedRun>& runs, const sys::TextStyle& style, std::optional<Over> over = {});

/// Each character stands for a part of the values, by their mean: lowest to highest. What is not finite is left out.
std::string sparkline(const std::vector<double>& values, std::size_t width, bool unicode);

}  // namespace cohort::track
