// What a training run leaves behind for people: its record (JSON lines), a picture of its curves, and a progress bar.
// Rank 0 owns them; other ranks make none. A RunRecord's methods may be called from any thread (as an Observer it is
// called from progress threads, where it only adds up); a Progress belongs to the training loop's thread.
// Needs no libtorch.
#pragma once

#include <cohort/observer.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
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

struct RunRecordOptions {
  std::string program;  ///< what ran, e.g. "digits"
  int world_size = 1;   ///< ranks
  Fields parameters;    ///< what it was started with: batch size, learning rate, seed, ...
};

/// One file of JSON lines per run, made on rank 0; docs/reference/run-record.md is its schema. An existing file is
/// appended to (a resumed run goes on in it). Every line is written whole by one call and is in the kernel's hands when
/// `write` returns, so a killed process loses at most the line it was writing; a later one cuts that off.
///
///     track::RunRecord record(out / "run.jsonl", {.program = "digits", .world_size = comm.size()});
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

  const std::filesystem::path& file() const noexcept;

  void on_collective(const CollectiveEvent& event) override;
  void on_bucket_ready(const BucketEvent& event) override;
  void on_step(const StepEvent& event) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Draws the curves of a run record (losses and accuracy over epochs, or over steps where it has no epochs) as a
/// self-contained SVG picture. Replaces `svg_file` at once or not at all. What a resumed run did again is drawn
/// once. Throws Unavailable if there is no such record, Io if a file cannot be read or written, Corrupt if
/// `record_file` is no run record.
void plot(const std::filesystem::path& record_file, const std::filesystem::path& svg_file);

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

  /// After each step: steps done in all, the latest loss, samples of this step over all ranks.
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
