// Progress of a training, from its run record: step, loss, time left, and two curves that are thinned out as they grow.
// Takes lines in their order; plain values, one thread. A View has the data from a run's launcher and record that the
// terminal and the page show, as values and as text (a line of JSON about the training, then live.json). Plain data;
// another process has written the input.
#pragma once

#include "base/result.h"
#include "launch/output/live_run.h"
#include "launch/output/text.h"
#include "telemetry/record.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::watch {

/// Values over steps, at most `most` of them, evenly spaced.
class Curve {
 public:
  static constexpr std::size_t kMost = 400;
  explicit Curve(std::size_t most = kMost) : most_(most) {}
  struct Point {
    double step = 0;
    double value = 0;
  };
  void add(double step, double value);
  void forget_after(double step);
  const std::vector<Point>& points() const noexcept { return points_; }

 private:
  std::size_t most_;
  std::vector<Point> points_;
  double spacing_ = 0;
};

/// Values that all ranks together, or rank 0, have logged under one name.
struct Logged {
  std::string name;
  double last = 0;
  Curve curve{100};
};

/// Adds a value to the curve of this name; returns false if there are too many names.
bool add_value(std::vector<Logged>& all, std::string_view name, double value, double at);

struct Progress {
  std::int64_t step = 0;
  std::optional<double> steps;   ///< number of steps in all, if the record has it
  double epoch = 0;              ///< epochs done, with a fraction
  std::optional<double> epochs;  ///< number of epochs in all
  std::string loss_name;
  std::optional<double> loss;
  std::optional<double> learning_rate;
  std::optional<double> seconds_left;  ///< time left at the speed since the last start
  Curve losses;
  Curve speeds;  ///< steps per second
  /// Values by name, in order of appearance; only the first few names are kept.
  std::vector<Logged> values;
  std::size_t left_out = 0;   ///< number of names not kept
  std::vector<Logged> usage;  ///< use of CPUs and GPUs (usage.jsonl), over seconds since the first value
};

class ProgressReader {
 public:
  void take(const track::RecordLine& line);
  const Progress& progress() const noexcept { return progress_; }

 private:
  struct Mark {
    double time = 0;
    double step = 0;
  };
  void take_step(double time, double step);
  void take_loss(const std::string& name, double value, double step);

  Progress progress_;
  track::PointReader points_;
  track::RunProgress run_;
  std::set<std::string, std::less<>> left_out_;
  std::optional<Mark> speed_from_;
};

using launch::bytes_text;
using launch::duration_text;
using launch::late_rank;
using launch::LiveRank;
using launch::LiveRun;
using launch::number_text;
using launch::samples_per_second;

struct View {
  std::string place;  ///< the run's folder, or the address of its page
  LiveRun run;
  Progress progress;
  double now = 0;  ///< by the clock of the machine that wrote this text
};

/// Rows are ranks or, if there are many, hosts, with sums of samples and memory, means of shares, the greatest delay.
enum class Rows { Ranks, Hosts };
inline constexpr std::size_t kManyRanks = 64;
LiveRun by_host(const LiveRun& run);
/// The run with only the ranks of one host; without ranks if there is no such host.
LiveRun of_host(const LiveRun& run, std::size_t host);
/// The host of a rank; empty if unknown.
std::string host_of(const LiveRun& run, int rank);

std::string to_text(const View& view, Rows rows);
/// Fails with Corrupt for an invalid text.
Result<View> parse_view(std::string_view text);

}  // namespace cohort::watch
