#include "base/json.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstddef>

namespace cohort {
namespace {

/// True if lists and objects are nested more than kDeepestJson levels. `text` need not be valid JSON.
bool is_too_deep(std::string_view text) noexcept {
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

template <class Json>
std::string text_of(const Json& value, int indent) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace

template <class Json>
Result<Json> parse_json(std::string_view text) {
  if (is_too_deep(text)) return fail(ErrorCode::Corrupt, "more than {} levels", kDeepestJson);
  try {
    return Json::parse(text);
  } catch (const typename Json::parse_error& error) {
    return fail(ErrorCode::Corrupt, "no JSON, from character {} on", error.byte);
  } catch (const typename Json::exception& error) {  // e.g. a number out of range
    return fail(ErrorCode::Corrupt, "no JSON: {}", error.what());
  }
}

template <class Json>
Json parse_json_or_discard(std::string_view text) {
  if (is_too_deep(text)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

template Result<nlohmann::json> parse_json(std::string_view);
template nlohmann::json parse_json_or_discard(std::string_view);
template nlohmann::ordered_json parse_json_or_discard(std::string_view);

template <class Json>
std::string text_in(const Json& json, const char* name) {
  const auto found = json.is_object() ? json.find(name) : json.end();
  return found != json.end() && found->is_string() ? found->template get<std::string>() : std::string();
}

template <class Json>
std::optional<double> number_in(const Json& json, const char* name) {
  const auto found = json.is_object() ? json.find(name) : json.end();
  if (found == json.end() || !found->is_number()) return std::nullopt;
  const auto value = found->template get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

template std::string text_in(const nlohmann::json&, const char*);
template std::string text_in(const nlohmann::ordered_json&, const char*);
template std::optional<double> number_in(const nlohmann::json&, const char*);
template std::optional<double> number_in(const nlohmann::ordered_json&, const char*);

std::string json_text(const nlohmann::json& value, int indent) { return text_of(value, indent); }
std::string json_text(const nlohmann::ordered_json& value, int indent) { return text_of(value, indent); }

}  // namespace cohort
