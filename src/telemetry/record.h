// RecordLine: one parsed line of a run record. The object can be reused, so that reading millions of lines needs no
// allocation for each. One thread.
// parse_record, read_run, ...: read whole records. Free functions without state; any thread.
// RecordFollower: reads a run record line by line, while it is written or afterwards. Reads only complete lines, so an
// incomplete last line, which the next writer cuts off, is never seen. One thread.
// PointReader: the values over steps in a record's lines, as points for sinks and pictures.
// append_all: appends to a file so that it always ends with a whole piece. Any thread; callers that share a file must
// synchronise.
#pragma once

#include "base/unique_fd.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cohort::track {

/// Prefix of the names of values that a program logged.
inline constexpr std::string_view kValues = "values/";

struct RecordLine {
  struct Field {
    std::string name;  ///< fields of an object are prefixed by its name: "parameters/lr"
    std::variant<bool, std::int64_t, double, std::string> value;
  };

  std::string event;
  std::optional<double> time;  ///< seconds since 1970
  std::vector<Field> fields;   ///< all other fields, in the line's order, without arrays and nulls

  /// Parses a line. Returns false, and leaves *this unspecified, if `text` is no JSON object with a text under "event".
  bool read(std::string_view text);

  const Field* find(std::string_view name) const noexcept;
  /// Returns a number, also from the texts "NaN", "Infinity" and "-Infinity"; nullopt if absent or not a number.
  std::optional<double> number(std::string_view name) const;
  std::optional<std::int64_t> integer(std::string_view name) const;
  /// Returns a text; empty if absent or not a text.
  std::string_view text(std::string_view name) const noexcept;
};

/// Like RecordLine::number; a boolean is not a number.
std::optional<double> number_of(const RecordLine::Field& field);
/// Returns the value in readable form: 0.1, 7, true, or a text unchanged.
std::string text_of(const RecordLine::Field& field);
/// Returns a number as in records, where "NaN", "Infinity" and "-Infinity" are texts.
std::string text_of(double number);

struct RecordLines {
  std::vector<RecordLine> events;  ///< in the order of the file
  std::size_t damaged = 0;         ///< number of whole lines that are not events
  bool torn = false;               ///< the last line is incomplete: its writer was killed
};

/// Never fails: lines that are not events are counted in `damaged`.
RecordLines parse_record(std::string_view text);
/// Throws Unavailable if there is no such file, Io if it cannot be read, Corrupt if it has lines but no event.
RecordLines read_record(const std::filesystem::path& file);

/// Reads a run's record, and merges the launcher's warnings (warnings.jsonl in the same folder) by time.
RecordLines read_run(const std::filesystem::path& record);

enum class Absent { Error, Later };
/// Returns the path of "run.jsonl" in a run's folder; returns a path that is no folder unchanged. Throws Unavailable if
/// the folder has no record, unless `absent` is Later.
std::filesystem::path record_of(const std::filesystem::path& run, Absent absent = Absent::Error);

/// Reads complete lines of a growing file.
class LineReader {
 public:
  LineReader(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  /// Returns the next line without its end, valid until the next call; nullopt if there is no complete line yet. Throws
  /// Io, or Corrupt if the file is shorter than what was read, or a line is longer than any event.
  std::optional<std::string_view> next();
  /// Offset at which the next line begins.
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  bool fill();

  int fd_;
  std::string path_;
  std::uint64_t offset_ = 0;
  std::string buffer_;
  std::size_t used_ = 0;  // bytes of buffer_
};

class RecordFollower {
 public:
  /// Throws Unavailable if there is no such file, Io if it cannot be read.
  explicit RecordFollower(const std::filesystem::path& record);

  /// Reads the next event; returns false if there is none yet. Counts lines that are not events. Throws like
  /// LineReader.
  bool next();
  const RecordLine& line() const noexcept { return line_; }
  /// Returns whether line() belongs to a step that was repeated after a `resume` line, if the file had that line when
  /// the follower began.
  bool superseded() const noexcept { return superseded_; }
  /// Offset at which the line after line() begins.
  std::uint64_t offset() const noexcept { return lines_.offset(); }
  std::size_t damaged() const noexcept { return damaged_; }

 private:
  struct Resume {
    std::uint64_t offset = 0;
    std::int64_t step = 0;  // lowest step of this resume and of all later ones
  };

  sys::UniqueFd fd_;
  LineReader lines_;
  RecordLine line_;
  std::vector<Resume> resumes_;
  std::size_t passed_resumes_ = 0, damaged_ = 0;
  std::int64_t step_ = std::numeric_limits<std::int64_t>::min();  // the latest step of any line
  bool superseded_ = false;
};

struct MetricPoint {
  std::string_view name;
  double value = 0;
  std::int64_t step = 0;
  double time = 0;          ///< seconds since 1970
  std::optional<int> rank;  ///< set if the value is of one rank
};

/// Returns whether the schema defines this event. Contents of lines with other events are not shown.
bool is_known_event(std::string_view event) noexcept;

/// Reads lines in order. Values without their own step belong to the last step. One thread.
class PointReader {
 public:
  /// Calls `take` for each number of a `metric`, `step`, `epoch` or `communication` line. Names from `communication`
  /// begin with that word: "communication/exposed_seconds", "communication/all_reduce/waited_seconds". The points
  /// passed to `take` refer into `line`.
  void read(const RecordLine& line, const std::function<void(const MetricPoint&)>& take);

 private:
  std::int64_t step_ = 0;
  double time_ = 0;
  std::string name_;
};

/// Bytes that a writer gathers before it appends them.
inline constexpr std::size_t kAppendBuffer = std::size_t{1} << 20;

struct AppendTo {
  int fd = -1;
  const std::filesystem::path& file;  ///< path of the file, for errors
  std::string_view what;              ///< what is done, for errors, e.g. "writing to the run record"
};

/// Appends `bytes`. Throws Io, naming the file, if not all can be written (a full disk); the file is then unchanged.
void append_all(const AppendTo& to, std::string_view bytes);
/// Throws "WHAT failed -- FILE -- errno's text -- ..."
[[noreturn]] void raise_io(const AppendTo& to, int error);

// Computes a run's progress, remaining time and latest logged values from the lines of its record. One thread.

/// Progress of a run, computed from its record's lines in order. The end of the run is known if the `start` line has a
/// parameter for epochs or steps (epochs, num_epochs, max_epochs; steps, max_steps, total_steps, num_steps).
class RunProgress {
 public:
  void take(const RecordLine& line);
  /// Total number; nullopt if the record does not say.
  std::optional<double> epochs() const noexcept { return epochs_; }
  std::optional<double> steps() const noexcept { return steps_; }
  /// Number of epochs done, with a fraction.
  std::optional<double> epoch() const noexcept { return epoch_; }
  /// Fraction of the run, 0 to 1; nullopt if its end is not known.
  std::optional<double> done() const;
  /// Extrapolated from the progress since the program's last start or resume; nullopt if not known yet.
  std::optional<double> remaining_seconds() const;
  const std::map<std::string, double, std::less<>>& values() const noexcept { return values_; }

 private:
  std::optional<double> epochs_, steps_, epoch_, step_;
  double time_ = 0;
  std::optional<double> first_done_;
  double first_time_ = 0;
  bool ended_ = false;
  PointReader points_;
  std::map<std::string, double, std::less<>> values_;  ///< by name: the latest value
};

}  // namespace cohort::track
