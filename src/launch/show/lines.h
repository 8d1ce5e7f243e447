// Makes whole lines out of the pieces in which a stream arrives. Pure; one thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// Of a terminal.
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

class LineSplitter {
 public:
  LineSplitter() = default;
  /// `longest`: of a line that is not cut, in bytes; 4 or more.
  explicit LineSplitter(std::size_t longest) : longest_(longest) {}
  /// The lines that `bytes` complete. "\r\n" ends a line as "\n" does.
  std::vector<Line> feed(std::string_view bytes);
  /// What has no end yet.
  std::string_view partial() const noexcept { return partial_; }
  /// Takes it: the stream has ended.
  std::string take_partial();

 private:
  std::size_t longest_ = kLongestLine;
  std::string partial_;
  bool after_return_ = false;
};

}  // namespace cohort::launch
