// The last line that a rank has printed, for tables: without escape sequences, cut to what fits there. Plain value.
#pragma once

#include "launch/messages.h"

#include <array>
#include <string>
#include <string_view>

namespace cohort::launch {

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

}  // namespace cohort::launch
