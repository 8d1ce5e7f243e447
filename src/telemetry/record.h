// One line of a run record, read. A value that can be read into again, so that a record of millions of lines costs no
// allocation for each; belongs to one thread.
// Reads run records back. Free functions, no state: any thread may call them.
// Reads a run record line by line while it is written, or afterwards. Only whole lines are read, so that neither a torn
// last line nor the next writer's cutting it off is seen. One thread.
// The values over steps in a line of a record, for any event: the points that sinks and pictures show.
// Appending to a file so that it always ends with something whole. Any thread; callers that share a file synchronise
// themselves.
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

/// Prefix of names that a program logged.
inline constexpr std::string_view kValues = "values/";

struct RecordLine {
  struct Field {
    std::string name;  ///< fields of an object have its name before them: "parameters/lr"
    std::variant<bool, std::int64_t, double, std::string> value;
  };

  std::string event;
  std::optional<double> time;  ///< seconds since 1970
  std::vector<Field> fields;   ///< all others, in the order of the line; arrays and nulls are left out

  /// False if `text` is no JSON object with a text under "event"; *this is then of no use.
  bool read(std::string_view text);

  const Field* find(std::string_view name) const noexcept;
  /// Also one of the texts "NaN", "Infinity", "-Infinity"; nullopt if it is not there or no number.
  std::optional<double> number(std::string_view name) const;
  std::optional<std::int64_t> integer(std::string_view name) const;
  /// Empty if it is not there or no text.
  std::string_view text(std::string_view name) const noexcept;
};

/// Like RecordLine::number; a truth value is no number.
std::optional<double> number_of(const RecordLine::Field& field);
/// Text as people write it: 0.1, 7, true, a text unchanged.
std::string text_of(const RecordLine::Field& field);
/// Text as in records: "NaN", "Infinity" and "-Infinity" are texts there.
std::string text_of(double number);

struct RecordLines {
  std::vector<RecordLine> events;  ///< in the order of the file
  std::size_t damaged = 0;         ///< whole lines that are no event
  bool torn = false;               ///< the last line has no end: its writer was killed while writing
};

/// Never fails: lines that are no events are counted.
RecordLines parse_record(std::string_view text);
/// Throws Unavailable if there is no such file, Io if it cannot be read, Corrupt if it has lines but not one event.
RecordLines read_record(const std::filesystem::path& file);

/// Reads the run's record, with its launcher's warnings (warnings.jsonl beside it) merged in by time.
RecordLines read_run(const std::filesystem::path& record);

enum class Absent { Error, Later };
/// "run.jsonl" of a run's folder; a path that is no folder as it is. For the folder of a run whose program has made no
/// record: throws Unavailable, unless the record may come later.
std::filesystem::path record_of(const std::filesystem::path& run, Absent absent = Absent::Error);

/// The whole lines of a file that grows.
class LineReader {
 public:
  LineReader(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  /// Without its end; valid until the next call. nullopt: there is no whole line more, now. Throws Io, and Corrupt
  /// where the file has become shorter than what was read, or a line is longer than any event.
  std::optional<std::string_view> next();
  /// Offset at which the next line begins.
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  bool fill();

  int fd_;
  std::string path_;
  std::uint64_t offset_ = 0;
  std::string buffer_;
  std::size_t used_ = 0;  // of buffer_
};

class RecordFollower {
 public:
  /// Throws Unavailable if there is no such file, Io if it cannot be read.
  explicit RecordFollower(const std::filesystem::path& record);

  /// Reads the next event; false: there is none more, now. Lines that are no events are counted. Throws as LineReader.
  bool next();
  const RecordLine& line() const noexcept { return line_; }
  /// Returns whether the step of line() was done again, according to a later `resume` that was there when the follower
  /// began.
  bool superseded() const noexcept { return superseded_; }
  /// Offset at which the line after line() begins.
  std::uint64_t offset() const noexcept { return lines_.offset(); }
  std::size_t damaged() const noexcept { return damaged_; }

 private:
  struct Resume {
    std::uint64_t offset = 0;
    std::int64_t step = 0;  // the lowest of this one and those after it
  };

  sys::UniqueFd fd_;
  LineReader lines_;
  RecordLine line_;
  std::vector<Resume> resumes_;
  std::size_t passed_resumes_ = 0, damaged_ = 0;
  std::int64_t step_ = std::numeric_limits<std::int64_t>::min();  // the last that a line named
  bool superseded_ = false;
};

struct MetricPoint {
  std::string_view name;
  double value = 0;
  std::int64_t step = 0;
  double time = 0;          ///< seconds since 1970
  std::optional<int> rank;  ///< of one rank alone
};

/// Returns whether the schema defines lines of that event; the contents of others are shown nowhere.
bool is_known_event(std::string_view event) noexcept;

/// Reads lines in their order: values without a step of their own belong to the last one. One thread.
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

/// Bytes gathered before they are appended.
inline constexpr std::size_t kAppendBuffer = std::size_t{1} << 20;

struct AppendTo {
  int fd = -1;
  const std::filesystem::path& file;  ///< for errors
  std::string_view what;              ///< likewise: "writing to the run record"
};

/// Appends all of `bytes`. Throws Io, naming the file, if they cannot be written (a full disk); the file then ends as
/// before.
void append_all(const AppendTo& to, std::string_view bytes);
/// "WHAT failed -- FILE -- errno's text -- ..."
[[noreturn]] void raise_io(const AppendTo& to, int error);

// Progress of a run, its remaining time, and the latest logged values; from the lines of its record. Plain values, one
// thread.

/// Progress of a run, computed from its record's lines, read in order. Its end is known if the `start` line's
/// parameters have epochs or steps (epochs, num_epochs, max_epochs; steps, max_steps, total_steps, num_steps).
class RunProgress {
 public:
  void take(const RecordLine& line);
  /// In all; nullopt: the record does not say.
  std::optional<double> epochs() const noexcept { return epochs_; }
  std::optional<double> steps() const noexcept { return steps_; }
  /// Done, a fraction.
  std::optional<double> epoch() const noexcept { return epoch_; }
  /// 0 to 1; nullopt: where it ends is not known.
  std::optional<double> done() const;
  /// Extrapolated from the progress since the last start or resume of the program; nullopt: not known yet.
  std::optional<double> remaining_seconds() const;
  const std::map<std::string, double, std::less<>>& values() const noexcept { return values_; }

 private:
  std::optional<double> epochs_, steps_, epoch_, step_;
  double time_ = 0;
  std::optional<double> first_done_;
  double first_time_ = 0;
  bool ended_ = false;
  PointReader points_;
  std::map<std::string, double, std::less<>> values_;  ///< the latest of each name
};

}  // namespace cohort::track
