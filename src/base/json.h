// Reads JSON with limits, and writes it. nlohmann's parser and writer are compiled only once, in json.cpp. Code that
// uses a value's members includes <nlohmann/json.hpp> in its .cpp file. Pure; any thread.
#pragma once

#include "base/result.h"

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <string_view>

namespace cohort {

/// Deepest nesting that is accepted, since readers are recursive.
inline constexpr int kDeepestJson = 64;

/// Parses untrusted JSON, the whole text as one value. Fails with Corrupt: "more than 64 levels", "no JSON, from
/// character 12 on".
template <class Json = nlohmann::json>
Result<Json> parse_json(std::string_view text);
/// Like parse_json, but returns a discarded value (`is_discarded`) if the text is not JSON or is nested too deeply.
template <class Json = nlohmann::json>
Json parse_json_or_discard(std::string_view text);

/// Return a member of an object. If `json` is no object, or has no such member of that type, return "" or nullopt (also
/// if the number is not finite).
template <class Json>
std::string text_in(const Json& json, const char* name);
template <class Json>
std::optional<double> number_in(const Json& json, const char* name);

/// Returns JSON on one line, or on many lines with `indent`. Bytes that are not UTF-8 become U+FFFD.
std::string json_text(const nlohmann::json& value, int indent = -1);
std::string json_text(const nlohmann::ordered_json& value, int indent = -1);

}  // namespace cohort
