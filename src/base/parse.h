// Parses numbers, booleans and lists of numbers such as "0,3-5" strictly: the whole text must be valid. Also hashes
// text. Pure; any thread.
#pragma once

#include "base/result.h"

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

template <std::integral T>
std::optional<T> parse_integer(std::string_view text) noexcept {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || text.empty()) return std::nullopt;
  return value;
}

/// Parses "1", "true", "yes", "on" and "0", "false", "no", "off", in upper or lower case.
inline std::optional<bool> parse_truth(std::string_view text) noexcept {
  const auto is = [text](std::string_view word) {
    return std::equal(text.begin(), text.end(), word.begin(), word.end(), [](char a, char b) {
      return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b;
    });
  };
  for (const std::string_view yes : {"1", "true", "yes", "on"}) {
    if (is(yes)) return true;
  }
  for (const std::string_view no : {"0", "false", "no", "off"}) {
    if (is(no)) return false;
  }
  return std::nullopt;
}

/// Removes the text up to the first of `marks`, mark included, and returns it without the mark; takes all text if there
/// is none.
inline std::string_view take_until(std::string_view& text, std::string_view marks) noexcept {
  const std::string_view taken = text.substr(0, text.find_first_of(marks));
  text.remove_prefix(taken.size() == text.size() ? taken.size() : taken.size() + 1);
  return taken;
}

/// Returns the length of the text's first character (UTF-8); 0 if the text does not begin with a valid one.
std::size_t character_length(std::string_view text) noexcept;

/// FNV-1a hash (Fowler, Noll, Vo): for names and to distinguish texts; not secure against attackers.
constexpr std::uint64_t fnv1a(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

/// Returns the numbers ascending, each once. Fails with InvalidArgument unless the text consists of numbers below
/// `limit` and ranges, separated by commas.
Result<std::vector<int>> parse_ranges(std::string_view text, int limit);

/// Returns "0-2,5" for {0, 1, 2, 5}. `numbers` must be ascending.
std::string to_ranges(const std::vector<int>& numbers);

}  // namespace cohort
