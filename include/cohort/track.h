// Output of a training run for people: its record (JSON lines), a picture of its curves, and a progress bar. Rank 0
// owns them; other ranks make none, but Metrics where they have values to log. The methods of RunRecord and Metrics may
// be called from any thread (as an Observer a RunRecord is called from progress threads, where it only adds up); a
// Progress belongs to the training loop's thread. Needs no libtorch.
#pragma once

#include <cohort/communicator.h>
#include <cohort/observer.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace cohort::track {

/// A number, a text or a truth value, as JSON has them.
class Value {
 public:
  Value(bool value) : value_(value) {}  // NOLINT(google-explicit-constructor): `{"epoch", 2}` should read well
  template <std::integral T>
  requires(!std::same_as<T, bool>) Value(T value)
      : value_(static_cast<std::int64_t>(value)) {}                      // NOLINT(google-explicit-constructor)
  Value(double value) : value_(value) {}                                 // NOLINT(google-explicit-constructor)
  Value(std::string value) : value_(std::move(value)) {}                 // NOLINT(google-explicit-constructor)
  Value(const char* value) : value_(std::string(value)) {}               // NOLINT(google-explicit-constructor)
  Value(const std::filesystem::path& value) : value_(value.string()) {}  // NOLINT(google-explicit-constructor)

  const std::variant<bool, std::int64_t, double, std::string>& get() const noexcept { return value_; }

 private:
  std::variant<bool, std::int64_t, double, std::string> value_;
};

using Fields = std::vector<std::pair<std::string, Value>>;

/// Values of one step, as a `metric` line has them.
struct MetricLine {
  std::int64_t step = 0;
  std::chrono::system_clock::time_point time = std::chrono::system_clock::now();
  std::vector<std::pair<std::string, double>> values;
  std::optional<int> rank = {};  ///< of this rank alone
};

struct RunRecordOptions {
  std::string program;  ///< what ran, e.g. "digits"
  int world_size = 1;   ///< ranks
  Fields parameters;    ///< what it was started with: batch size, learning rate, seed, ...
};

/// Folder for a run's record, in which `cohort watch`, `cohort plot` and `--track` find it: the run's folder under
/// `cohort run` (COHORT_RUN_DIR), else the working directory.
std::filesystem::path run_folder();

/// One file of JSON lines per run, made on rank 0; docs/reference/run-record.md is its schema. An existing file is
/// appended to (a resumed run goes on in it). Every line is written whole by one call and is in the kernel's hands when
/// `write` returns, so a killed process loses at most the line it was writing; a later one cuts that off.
///
///     track::RunRecord record(track::run_folder() / "run.jsonl", {.program = "digits", .world_size = comm.size()});
///     comm.set_observer(&record);
///     record.write("step", {{"step", step}, {"epoch", 1.25}, {"train_loss", loss}});
class RunRecord final : public Observer {
 public:
  /// Opens the file, making its folder if need be, and writes a `start` line. Throws Io, naming the path; Unavailable
  /// if another process is writing to the same file.
  explicit RunRecord(const std::filesystem::path& file, const RunRecordOptions& options = {});
  ~RunRecord() override;
  RunRecord(const RunRecord&) = delete;
  RunRecord& operator=(const RunRecord&) = delete;

  /// Appends `{"event": event, "time": now, fields...}`. Numbers that are not finite become the texts "NaN", "Infinity"
  /// and "-Infinity". Throws Io when the line cannot be written (a full disk); the file then ends as before.
  void write(std::string_view event, const Fields& fields = {});
  /// Appends a `communication` line with what the observer has seen since the last one: number, bytes and seconds of
  /// each operation, seconds waited for peers, steps and exposed communication. Nothing if nothing was seen.
  void write_communication();

  /// Appends a `metric` line for each, all by one call. Throws as `write`. Metrics does it in the background.
  void write_metrics(std::span<const MetricLine> lines);

  const std::filesystem::path& file() const noexcept;

  void on_collective(const CollectiveEvent& event) override;
  void on_bucket_ready(const BucketEvent& event) override;
  void on_step(const StepEvent& event) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Metric {
  template <class T>
  requires std::is_arithmetic_v<T> Metric(std::string_view its_name, T its_value)
      : name(its_name), value(static_cast<double>(its_value)) {}

  std::string_view name;
  double value;
};

/// How the values that all ranks log are combined.
enum class Reduce {
  No,    ///< rank 0's are written; other ranks' are not
  Mean,  ///< each rank counts as much as any other
  Max,
  Min,
  Sum,
  Each,  ///< all are written, with their ranks
  Average = Mean,
};

struct MetricsOptions {
  /// For values of several ranks. All ranks make their Metrics then, which form a group of their own in it: that
  /// blocks.
  Communicator communicator = {};
  std::chrono::milliseconds interval = std::chrono::seconds(1);  ///< between two writes
  /// How long the end waits for values that other ranks have not logged yet.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
};

/// Logs values over steps at a cost of about a microsecond: a thread writes them to the record, at intervals and at the
/// end, so a killed process loses those of the last second. Values of several ranks meet in the group of that thread,
/// by two small operations at each interval, and never delay the training's own.
///
///     track::Metrics metrics(&record, {.communicator = comm});     // on all ranks; `&record` on rank 0, else nullptr
///     metrics.log(step, {{"loss", loss}, {"lr", lr}});             // rank 0's
///     metrics.log(step, {{"step_ms", ms}}, track::Reduce::Max);    // on all ranks, in the same order
class Metrics {
 public:
  /// `record` (not owned) is where rank 0 writes. Throws what Communicator::group throws.
  explicit Metrics(RunRecord* record, const MetricsOptions& options = {});
  /// Writes what is left. All ranks of a communicator do it; one that does not come is waited for as MetricsOptions
  /// say.
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// Never throws for later failures: a full disk or a lost rank is reported once in the log, the training goes on, and
  /// what could not be reduced is written as rank 0's. Reduced values: InvalidArgument without a communicator.
  void log(std::int64_t step, std::span<const Metric> values, Reduce reduce = Reduce::No);
  void log(std::int64_t step, std::initializer_list<Metric> values, Reduce reduce = Reduce::No) {
    log(step, std::span(values.begin(), values.size()), reduce);
  }
  /// Writes rank 0's values now, in this thread. Throws Io where that fails; they are kept for the next time.
  void flush();
  /// Writes what is left; what is logged later is not. All ranks of a communicator do it; for one that does not come it
  /// waits for `patience`, by default as MetricsOptions say.
  void close(std::optional<std::chrono::milliseconds> patience = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Draws the curves of a run record (losses and accuracy over epochs, or over steps where it has no epochs) as a
/// self-contained SVG picture. Replaces `svg_file` at once or not at all. Steps that a resumed run did again are drawn
/// once. Throws Unavailable if there is no such record, Io if a file cannot be read or written, Corrupt if
/// `record_file` is no run record.
void plot(const std::filesystem::path& record_file, const std::filesystem::path& svg_file);

/// Something that the program does, from the making of this to its end, in the trace of `cohort run --trace`; without
/// one it costs two loads. `name` has to live as long; the first 60 bytes count. Spans of a thread lie within each
/// other.
///
///     { track::Span span("augment"); augment(batch); }
class Span {
 public:
  explicit Span(std::string_view name) noexcept;
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  std::string_view name_;
  std::chrono::steady_clock::time_point begun_;
};

struct ProgressOptions {
  std::int64_t steps_per_epoch = 0;
  std::int64_t epochs = 0;
  std::int64_t first_step = 0;   ///< steps done by an earlier run that this one resumes
  std::int64_t first_epoch = 0;  ///< whole epochs among these, and the steps that this run needs for the rest of the
                                 ///< next: on another number of ranks an epoch has had other steps
  std::optional<std::int64_t> steps_left_in_first_epoch = {};  ///< default: all steps have been as this run's
  std::FILE* stream = stdout;
  /// One line that is drawn over (true) or plain lines (false); default: whether `stream` is a terminal.
  std::optional<bool> terminal = {};
  /// At most one drawing per interval; default: 0.1 s on a terminal, 2 s otherwise.
  std::optional<std::chrono::milliseconds> interval = {};
};

/// A progress bar: epoch, step, loss, samples per second (over the last interval), time left. On a terminal it is one
/// line that is drawn over; elsewhere (a pipe, a log file) plain lines at intervals.
class Progress {
 public:
  explicit Progress(const ProgressOptions& options);
  ~Progress();  ///< as `finish()`
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Call after each step: steps done in all, the latest loss, samples of this step over all ranks.
  void update(std::int64_t step, double loss, std::int64_t samples);
  /// Leaves the time since the last step out of the speed: it was spent on evaluation or a checkpoint.
  void skip_time();
  /// A line that stays, above the bar.
  void line(std::string_view text);
  /// Takes the bar away. Further calls do nothing.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::track
