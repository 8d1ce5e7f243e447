// The values of a run over its steps, by name, for figures and tables. Plain values and pure functions; any thread may
// use them.
// Makes figures of runs' curves, and tables of their end values. Pure; any thread may call it.
#pragma once

#include "base/terminal.h"
#include "observe/plot/figure.h"
#include "telemetry/record.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::track {

/// Horizontal axis of values. Time is the run's time, without the time between its end and its resumption.
enum class Over { Epoch, Step, Time };

/// A value and its position; NaN if not known.
struct Sample {
  double step = 0, epoch = 0, seconds = 0, value = 0;
  double at(Over what) const noexcept { return what == Over::Epoch ? epoch : what == Over::Step ? step : seconds; }
};

/// An event of the run.
struct Happening {
  enum class Kind { Resumed, Warned } kind = Kind::Resumed;
  Sample at = {};  ///< position of the event; has no value
  std::string text = {};
};

struct RunSeries {
  std::string program = "run", job;
  std::vector<double> sizes;  ///< number of ranks in each part of the run
  /// Values by name and rank; rank -1: values of the whole run. Losses and accuracies have fixed names, whatever the
  /// program calls them: train_loss, test_loss, train_accuracy, test_accuracy.
  std::map<std::string, std::map<std::int64_t, std::vector<Sample>>> values;
  std::vector<Happening> happened;
  std::size_t damaged = 0;  ///< number of damaged lines

  /// Returns the whole run's samples of a name; empty if there are none.
  const std::vector<Sample>& of(const std::string& name) const;
  /// Returns whether every value has a position on this axis.
  bool has(Over what) const;
};

/// Collects a record's series. A `resume` at step S drops earlier values of later steps, which are repeated.
RunSeries series_of(const RecordLines& record);

/// Makes panels of losses and accuracies, and one for each other logged name; by default over epochs, or over steps if
/// the record has no epochs.
Figure figure_of(const RunSeries& run, std::optional<Over> over = {});

struct NamedRun {
  std::string name;
  RunSeries run;
};

/// Makes a figure of several runs like figure_of, with a panel for each name and a curve for each run.
Figure compare(const std::vector<NamedRun>& runs, std::optional<Over> over = {});

/// Makes a line for each name and run: the end value, its difference from the first run's, and a sparkline.
std::string end_values(const std::vector<NamedRun>& runs, const sys::TextStyle& style, std::optional<Over> over = {});

/// Writes the figure of a record; replaces `svg_file` atomically. Throws Unavailable if there is no such record, Io, or
/// Corrupt if it is no record of a run.
void plot(const std::filesystem::path& record_file, const std::filesystem::path& svg_file);

/// Draws the values in characters, each showing the mean of a part of the values. Non-finite values are left out.
std::string sparkline(const std::vector<double>& values, std::size_t width, bool unicode);

}  // namespace cohort::track
