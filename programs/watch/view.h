// Progress of a training, from its run record: step, loss, time left, and two curves that are thinned out as they grow.
// Takes lines in their order; plain values, one thread.
// The view of a run, in the terminal and on the page: data of its launcher and its record, as values and as text (a
// line of JSON about the training, then live.json). Plain data; input was written by another process.
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

/// Values logged under one name, by all ranks together or by rank 0.
struct Logged {
  std::string name;
  double last = 0;
  Curve curve{100};
};

/// To the curve of this name; false: there are too many already.
bool add_value(std::vector<Logged>& all, std::string_view name, double value, double at);

struct Progress {
  std::int64_t step = 0;
  std::optional<double> steps;   ///< in all, where the record says so
  double epoch = 0;              ///< done, a fraction
  std::optional<double> epochs;  ///< in all
  std::string loss_name;
  std::optional<double> loss;
  std::optional<double> learning_rate;
  std::optional<double> seconds_left;  ///< at the pace since the last start
  Curve losses;
  Curve speeds;  ///< steps per second
  /// In the order in which they came; the first few where there are many.
  std::vector<Logged> values;
  std::size_t left_out = 0;   ///< names of values beyond these
  std::vector<Logged> usage;  ///< of CPUs and GPUs (usage.jsonl), over seconds since the first
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
  std::string place;  ///< the run's folder, or where it is watched from
  LiveRun run;
  Progress progress;
  double now = 0;  ///< by the clock of who wrote this text: another machine's may differ
};

/// Rows are ranks, or hosts where there are many: sums of samples and memory, means of shares, the latest rank.
enum class Rows { Ranks, Hosts };
inline constexpr std::size_t kManyRanks = 64;
LiveRun by_host(const LiveRun& run);
/// The ranks of one host alone; none if there is no such host.
LiveRun of_host(const LiveRun& run, std::size_t host);
/// The host of a rank; empty if none is known.
std::string host_of(const LiveRun& run, int rank);

std::string to_text(const View& view, Rows rows);
/// Corrupt for what is no such text.
Result<View> parse_view(std::string_view text);

}  // namespace cohort::watch
