// Output of a training run for people: its record (JSON lines), values over steps, and a progress bar. Rank 0
// owns these objects; other ranks make only Metrics, if they have values to log. The methods of RunRecord and Metrics
// may be called from any thread (progress threads call a RunRecord as an Observer; it then only adds up); a Progress
// belongs to the training loop's thread. Needs no libtorch.
#pragma once

#include <cohort/buffer.h>
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
  std::optional<int> rank = {};  ///< set if the values are only that rank's
};

/// A tensor of the model, in host memory.
struct Weight {
  std::string_view name;
  ConstBuffer values;
};

struct RunRecordOptions {
  std::string program;  ///< name of the program, e.g. "digits"
  int world_size = 1;   ///< ranks
  Fields parameters;    ///< parameters of the run: batch size, learning rate, seed, ...
};

/// Folder in which `cohort watch`, `cohort plot` and `--track` find a run's record: the run's folder under `cohort run`
/// (COHORT_RUN_DIR), else the working directory.
std::filesystem::path run_folder();

/// One file of JSON lines per run, made on rank 0; docs/reference/run-record.md is its schema. Lines are appended to an
/// existing file (by a resumed run). Every line is written by one system call and has reached the kernel when `write`
/// returns, so a killed process loses at most the line it was writing; the next process cuts off that line.
///
///     track::RunRecord record(track::run_folder() / "run.jsonl", {.program = "digits", .world_size = comm.size()});
///     comm.set_observer(&record);
///     record.write("step", {{"step", step}, {"epoch", 1.25}, {"train_loss", loss}});
class RunRecord final : public Observer {
 public:
  /// Opens the file, creating its folder if necessary, and writes a `start` line. Throws Io, naming the path;
  /// Unavailable if another process is writing to the same file.
  explicit RunRecord(const std::filesystem::path& file, const RunRecordOptions& options = {});
  ~RunRecord() override;
  RunRecord(const RunRecord&) = delete;
  RunRecord& operator=(const RunRecord&) = delete;

  /// Appends `{"event": event, "time": now, fields...}`. Numbers that are not finite become the texts "NaN", "Infinity"
  /// and "-Infinity". Throws Io if the line cannot be written (a full disk); the file is then unchanged.
  void write(std::string_view event, const Fields& fields = {});
  /// Appends a `communication` line with the observer's events since the last such line: number, bytes and seconds of
  /// each operation, seconds waited for peers, steps and exposed communication. Appends nothing if there were no
  /// events.
  void write_communication();

  /// Appends a `weights` line: a 128-bit digest of the bytes of each tensor after `step`, and one of all, whatever the
  /// tensors' order. `cohort runs compare A B` says from such lines until which step two runs have the same weights,
  /// and which tensors differ first. Shapes and types do not count. Reads each tensor once, 0.3 ms per MiB. Throws
  /// Io as `write`, and InvalidArgument if a tensor is on a GPU or two have one name.
  void write_weights(std::int64_t step, std::span<const Weight> weights);

  /// Appends a `metric` line for each element, all by one system call. Throws as `write`. Called by Metrics.
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

/// Selects how the values that all ranks log are combined.
enum class Reduce {
  No,    ///< only rank 0's values are written
  Mean,  ///< the mean over ranks, each with the same weight
  Max,
  Min,
  Sum,
  Each,  ///< all values are written, with their ranks
  Average = Mean,
};

struct MetricsOptions {
  /// Needed for values of several ranks. All ranks then make a Metrics, whose constructor forms a group in this
  /// communicator, and so blocks.
  Communicator communicator = {};
  std::chrono::milliseconds interval = std::chrono::seconds(1);  ///< between two writes
  /// Time that `close` and the destructor wait for values that other ranks have not logged yet.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
};

/// Logs values over steps at a cost of about a microsecond. A thread writes them to the record, at intervals and at the
/// end, so a killed process loses the values of the last interval. That thread combines values of several ranks in a
/// group of its own, by two small operations at each interval. These never delay the training's operations.
///
///     track::Metrics metrics(&record, {.communicator = comm});     // on all ranks; `&record` on rank 0, else nullptr
///     metrics.log(step, {{"loss", loss}, {"lr", lr}});             // rank 0's
///     metrics.log(step, {{"step_ms", ms}}, track::Reduce::Max);    // on all ranks, in the same order
class Metrics {
 public:
  /// Rank 0 writes to `record` (not owned). Throws what Communicator::group throws.
  explicit Metrics(RunRecord* record, const MetricsOptions& options = {});
  /// Writes the remaining values. All ranks of the communicator do so; MetricsOptions::patience limits the wait for
  /// others.
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// Does not throw if writing or reducing fails: a full disk or a lost rank is reported once in the log, training goes
  /// on, and values that could not be reduced are written as rank 0's. Throws InvalidArgument for values to be reduced
  /// if there is no communicator.
  void log(std::int64_t step, std::span<const Metric> values, Reduce reduce = Reduce::No);
  void log(std::int64_t step, std::initializer_list<Metric> values, Reduce reduce = Reduce::No) {
    log(step, std::span(values.begin(), values.size()), reduce);
  }
  /// Writes rank 0's values now, in this thread. Throws Io if that fails, and keeps the values for the next time.
  void flush();
  /// Writes the remaining values; values logged later are dropped. All ranks of the communicator call it; it waits up
  /// to `patience` (default: that of MetricsOptions) for a rank that does not come.
  void close(std::optional<std::chrono::milliseconds> patience = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Marks a span of the program's time, from construction to destruction, in the trace of `cohort run --trace`; without
/// a trace it costs two loads. `name` has to live as long as the Span; its first 60 bytes count. Spans of one thread
/// nest.
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
  std::int64_t first_epoch = 0;  ///< whole epochs among these steps
  /// Steps that this run takes to end the epoch in which the earlier run stopped, for a run on another number of ranks.
  /// Default: computed as if the earlier run's epochs had as many steps as this run's.
  std::optional<std::int64_t> steps_left_in_first_epoch = {};
  std::FILE* stream = stdout;
  /// True: one line that is redrawn; false: plain lines. Default: true if `stream` is a terminal.
  std::optional<bool> terminal = {};
  /// At most one drawing per interval; default: 0.1 s on a terminal, 2 s otherwise.
  std::optional<std::chrono::milliseconds> interval = {};
};

/// A progress bar: epoch, step, loss, samples per second (over the last interval), time left. On a terminal the bar is
/// one line that is redrawn; elsewhere (a pipe, a log file) plain lines at intervals.
class Progress {
 public:
  explicit Progress(const ProgressOptions& options);
  ~Progress();  ///< does what `finish()` does
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Updates the bar; call after each step, with the number of steps done in all, the latest loss, and this step's
  /// samples over all ranks.
  void update(std::int64_t step, double loss, std::int64_t samples);
  /// Leaves the time since the last step, spent on evaluation or a checkpoint, out of the speed.
  void skip_time();
  /// Prints a line that stays, above the bar.
  void line(std::string_view text);
  /// Removes the bar. Further calls do nothing.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::track
