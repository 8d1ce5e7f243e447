// JSON that somebody else has written: no deeper than what reads it, by recursion, can bear. For those that link
// nlohmann_json. Pure; any thread.
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <string_view>

namespace cohort {

inline constexpr int kDeepestJson = 64;

/// Whether lists and objects are within each other deeper than that. `text` need not be JSON.
inline bool is_too_deep(std::string_view text) noexcept {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (quoted) {
      if (text[i] == '\\') {
        ++i;
      } else {
        quoted = text[i] != '"';
      }
    } else if (text[i] == '"') {
      quoted = true;
    } else if (text[i] == '[' || text[i] == '{') {
      if (++depth > kDeepestJson) return true;
    } else if (text[i] == ']' || text[i] == '}') {
      --depth;
    }
  }
  return false;
}

/// The text as one value; discarded (`is_discarded`) if it is none, or too deep.
template <class Json = nlohmann::json>
Json parse_json_or_discard(std::string_view text) {
  if (is_too_deep(text)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace cohort
