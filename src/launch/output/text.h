// Output and figures as people read them: whole lines from the pieces of a stream, the last line of a rank, and a run
// in one line. Pure; values of one thread.
#pragma once

#include "launch/messages.h"
#include "launch/output/live_run.h"

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// Escape sequence that makes a terminal erase its line.
inline constexpr std::string_view kEraseLine = "\r\033[K";
/// Longest line; a longer one is passed on in parts, so that a stream without line ends cannot take all memory.
inline constexpr std::size_t kLongestLine = std::size_t{64} << 10;

/// Returns the length of the escape sequence at the beginning of `text`; 0 if its end is missing.
std::size_t escape_length(std::string_view text);

/// Returns the length of `text` without an incomplete UTF-8 character or escape sequence at its end.
std::size_t whole_text(std::string_view text);

struct Line {
  std::string text;  ///< without the line end
  enum class End {
    Newline,
    Return,  ///< the next line overwrites this one: a progress bar
    Cut,     ///< too long: the next line continues this one
  };
  End end = End::Newline;
};

/// Returns the line as a terminal finally shows it: without escape sequences and control characters, and without blanks
/// at the end; at most about `longest` bytes.
std::string plain(std::string_view line, std::size_t longest = std::string_view::npos);

/// Splits a stream, which arrives in pieces, into whole lines.
class LineSplitter {
 public:
  LineSplitter() = default;
  /// `longest`: bytes of the longest line that is not cut; 4 or more.
  explicit LineSplitter(std::size_t longest) : longest_(longest) {}
  /// Returns the lines that `bytes` complete. "\r\n" ends a line as "\n" does.
  std::vector<Line> feed(std::string_view bytes);
  /// Returns the unfinished line.
  std::string_view partial() const noexcept { return partial_; }
  /// Removes and returns the unfinished line, when the stream has ended.
  std::string take_partial();

 private:
  std::size_t longest_ = kLongestLine;
  std::string partial_;
  bool after_return_ = false;
};

/// The last line that a rank has printed, for tables: without escape sequences, cut to the width of a table.
class LastLine {
 public:
  static constexpr std::size_t kLongest = 160;

  void append(Stream stream, std::string_view bytes);
  /// Returns the last line that is not empty. Bytes that are no UTF-8 stay.
  const std::string& text() const noexcept { return text_; }

 private:
  std::array<std::string, 2> partial_;  ///< by stream: the unfinished line
  std::string text_;
};

/// Returns "1:05", "2:03:04", "3 d 4 h".
std::string duration_text(double seconds);
/// Returns "1.2G".
std::string bytes_text(double bytes);
/// Returns three digits: "0.31", "412", "12.3k".
std::string number_text(double value);
/// Returns "22%"; "-" if the share is nearly 0.
std::string percent_text(double share);

/// Returns the samples per second of all ranks.
double samples_per_second(const LiveRun& run);
/// Returns the rank that the others wait for most, if that takes at least a tenth of the time; -1: none.
int late_rank(const LiveRun& run);
/// Returns "running 1:23" or "ended with status 1 1:23".
std::string state_text(const LiveRun& run, double now);
/// Returns "servers: 3 running, 1 failed, 1.2G; evaluator: running"; empty if there are only ranks.
std::string others_text(const LiveRun& run);
/// Returns true if live.json is outdated: a launcher that lives writes it every 2 s.
bool is_silent(const LiveRun& run, double now);
/// Returns "running 1:23  step 1200  412 samples/s  late: rank 3 (22%)". `progress`: replaces the ranks' steps.
std::string summary(const LiveRun& run, double now, std::string_view progress = {});

}  // namespace cohort::launch
