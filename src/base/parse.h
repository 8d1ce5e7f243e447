// Strict numbers from text: the whole text or nothing.
#pragma once

#include <charconv>
#include <concepts>
#include <optional>
#include <string_view>

namespace cohort {

template <std::integral T>
std::optional<T> parse_integer(std::string_view text) noexcept {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || text.empty()) return std::nullopt;
  return value;
}

}  // namespace cohort
