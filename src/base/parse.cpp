#include "base/parse.h"

#include <cstddef>
#include <set>

namespace cohort {

std::size_t character_length(std::string_view text) noexcept {
  const auto byte = [text](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U; };
  const unsigned first = byte(0), second = byte(1);
  const std::size_t length = first < 0x80   ? 1
                             : first < 0xC2 ? 0
                             : first < 0xE0 ? 2
                             : first < 0xF0 ? 3
                             : first < 0xF5 ? 4
                                            : 0;
  if (text.size() < length) return 0;
  for (std::size_t at = 1; at < length; ++at) {
    if ((byte(at) & 0xC0) != 0x80) return 0;
  }
  // Rejects overlong forms, surrogates, and numbers beyond the last character.
  if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) || (first == 0xF0 && second < 0x90) ||
      (first == 0xF4 && second > 0x8F))
    return 0;
  return length;
}

Result<std::vector<int>> parse_ranges(std::string_view text, int limit) {
  std::set<int> numbers;
  std::string_view rest = text;
  while (true) {
    const auto comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const auto dash = part.find('-');
    const auto first = parse_integer<int>(part.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_integer<int>(part.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first) {
      return fail(ErrorCode::InvalidArgument, "'{}': numbers and ranges of them are wanted, such as 0,3-5", text);
    }
    if (*last >= limit) {
      return fail(ErrorCode::InvalidArgument, "'{}': there is no {}; the last one is {}", text, *last, limit - 1);
    }
    for (int number = *first; number <= *last; ++number) numbers.insert(number);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return std::vector<int>(numbers.begin(), numbers.end());
}

std::string to_ranges(const std::vector<int>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(numbers[i]);
    // "0-1" is as short as "0,1", and easier to read.
    if (end > i) text += "-" + std::to_string(numbers[end]);
    i = end + 1;
  }
  return text;
}

}  // namespace cohort
