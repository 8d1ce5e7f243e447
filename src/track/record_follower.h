// Reads a run record line by line while it is written, or afterwards. Only whole lines are read, so that neither a torn
// last line nor the next writer's cutting it off is seen. One thread.
#pragma once

#include "track/record_line.h"

#include "sys/unique_fd.h"

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

/// The whole lines of a file that grows.
class LineReader {
 public:
  LineReader(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  /// Without its end; valid until the next call. nullopt: there is no whole line more, now. Throws Io, and Corrupt
  /// where the file has become shorter than what was read, or a line is longer than any event.
  std::optional<std::string_view> next();
  /// Where the next line begins.
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
  /// Whether the step of line() was done again: so said a later `resume` that was there when the follower began.
  bool superseded() const noexcept { return superseded_; }
  /// Where the line after line() begins.
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

}  // namespace cohort::track
