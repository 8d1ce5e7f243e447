// The values of a run over its steps, by name, as pictures and tables of it show them. Values and pure functions; any
// thread may use them.
#pragma once

#include "track/record_reader.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cohort::track {

/// What values stand over; time is that of the run, without what passed between its end and its being resumed.
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

  /// Of the run; empty if there are none.
  const std::vector<Sample>& of(const std::string& name) const;
  /// Whether every value can stand over this.
  bool has(Over what) const;
};

/// After a `resume` at step S, what earlier lines say of later steps counts no more: it was done again.
RunSeries series_of(const RecordLines& record);

}  // namespace cohort::track
