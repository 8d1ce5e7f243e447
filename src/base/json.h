// JSON read with limits, and written: nlohmann's parser and writer are compiled once, in json.cpp. Code that looks into
// a value includes <nlohmann/json.hpp> in its .cpp file. Pure; any thread.
#pragma once

#include "base/result.h"

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <string_view>

namespace cohort {

/// Nesting that recursive readers can bear.
inline constexpr int kDeepestJson = 64;

/// JSON that somebody else has written: the text as one value. Corrupt: "more than 64 levels", "no JSON, from character
/// 12 on".
template <class Json = nlohmann::json>
Result<Json> parse_json(std::string_view text);
/// Likewise; discarded (`is_discarded`) if it is none, or too deep.
template <class Json = nlohmann::json>
Json parse_json_or_discard(std::string_view text);

/// The member of an object, where `json` is one and has it with that type; else "", or nullopt (also if not finite).
template <class Json>
std::string text_in(const Json& json, const char* name);
template <class Json>
std::optional<double> number_in(const Json& json, const char* name);

/// Text on one line, or with `indent` on many. Bytes that are no UTF-8 become U+FFFD, as is right for names and output.
std::string json_text(const nlohmann::json& value, int indent = -1);
std::string json_text(const nlohmann::ordered_json& value, int indent = -1);

}  // namespace cohort
