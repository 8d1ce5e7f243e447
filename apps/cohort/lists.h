// Lists as people type them: 1,2,4. Pure; any thread.
#pragma once

#include "base/parse.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {

/// Its parts, also empty ones: of "" one.
inline std::vector<std::string> split(std::string_view text, char at = ',') {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// Nullopt if one of them is no number from 1 to `most`.
inline std::optional<std::vector<int>> numbers_in(std::string_view text, int most) {
  std::vector<int> numbers;
  for (const std::string& part : split(text)) {
    const auto number = parse_integer<int>(part);
    if (!number || *number < 1 || *number > most) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

}  // namespace cohort::app
