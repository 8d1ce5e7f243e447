// Output and figures as people read them: whole lines out of the pieces in which a stream arrives, the last line of a
// rank, and a run in one line. Pure; values of one thread.
#pragma once

#include "launch/messages.h"
#include "launch/output/live_run.h"

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// Escape sequence by which a terminal erases its line.
inline constexpr std::string_view kEraseLine = "\r\033[K";
/// A longer line is passed on in parts, so that a stream without line ends cannot take all memory.
inline constexpr std::size_t kLongestLine = std::size_t{64} << 10;

/// The length of the escape sequence that begins `text` with ESC; 0 if its end is not there yet.
std::size_t escape_length(std::string_view text);

/// The length of `text` up to the beginning of a last UTF-8 character or escape sequence that is incomplete.
std::size_t whole_text(std::string_view text);

struct Line {
  std::string text;  ///< without its end
  enum class End {
    Newline,
    Return,  ///< the next one overwrites it: a progress bar
    Cut,     ///< too long: the next one continues it
  };
  End end = End::Newline;
};

/// As a terminal shows it at the end: no escape sequences and control characters, no blanks at the end; about so many
/// bytes at most.
std::string plain(std::string_view line, std::size_t longest = std::string_view::npos);

/// Makes whole lines out of the pieces in which a stream arrives.
class LineSplitter {
 public:
  LineSplitter() = default;
  /// `longest`: of a line that is not cut, in bytes; 4 or more.
  explicit LineSplitter(std::size_t longest) : longest_(longest) {}
  /// The lines that `bytes` complete. "\r\n" ends a line as "\n" does.
  std::vector<Line> feed(std::string_view bytes);
  /// The line that has no end yet.
  std::string_view partial() const noexcept { return partial_; }
  /// Takes it: the stream has ended.
  std::string take_partial();

 private:
  std::size_t longest_ = kLongestLine;
  std::string partial_;
  bool after_return_ = false;
};

/// The last line that a rank has printed, for tables: without escape sequences, cut to what fits there.
class LastLine {
 public:
  static constexpr std::size_t kLongest = 160;

  void append(Stream stream, std::string_view bytes);
  /// Empty lines do not count. Bytes that are no UTF-8 stay.
  const std::string& text() const noexcept { return text_; }

 private:
  std::array<std::string, 2> partial_;  ///< by stream: what has no end yet
  std::string text_;
};

/// "1:05", "2:03:04", "3 d 4 h".
std::string duration_text(double seconds);
/// "1.2G".
std::string bytes_text(double bytes);
/// Three digits: "0.31", "412", "12.3k".
std::string number_text(double value);
/// "22%"; "-" for next to nothing.
std::string percent_text(double share);

/// Samples per second of all ranks.
double samples_per_second(const LiveRun& run);
/// The rank that the others wait for most, where that is at least a tenth of the time; -1: none.
int late_rank(const LiveRun& run);
/// "running 1:23", "ended with status 1 1:23".
std::string state_text(const LiveRun& run, double now);
/// "servers: 3 running, 1 failed, 1.2G; evaluator: running"; empty: there are only ranks.
std::string others_text(const LiveRun& run);
/// The launcher writes live.json every 2 s while it lives.
bool is_silent(const LiveRun& run, double now);
/// "running 1:23  step 1200  412 samples/s  late: rank 3 (22%)". `progress`: what is known better than from the ranks.
std::string summary(const LiveRun& run, double now, std::string_view progress = {});

}  // namespace cohort::launch
