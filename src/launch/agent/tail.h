// The last lines of a stream, in bounded memory. Plain value; one thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace cohort::launch {

inline constexpr std::size_t kTracebackLines = 60;

class Tail {
 public:
  explicit Tail(std::size_t lines, std::size_t longest_bytes = 16 * 1024) : lines_(lines), longest_(longest_bytes) {}

  void append(std::string_view bytes);
  /// At most so many lines and bytes, the last ones; starts at the beginning of a line where that is possible. Stack
  /// frames as libtorch's errors have them by the hundred ("frame #12: ...") are left out and do not count. If a
  /// Python traceback is among what is kept, from its first line on, since it says why: all of it up to
  /// kTracebackLines, else its end and the last of what came after it.
  std::string text() const;

 private:
  std::size_t lines_;
  std::size_t longest_;
  std::string bytes_;     ///< whole lines without frames, then the beginning of one
  std::size_t line_ = 0;  ///< where that begins
};

}  // namespace cohort::launch
