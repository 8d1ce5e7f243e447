#include "cluster/json_text.h"

#include "base/json.h"
#include "base/parse.h"

#include <cstdint>

namespace cohort::cluster {

using nlohmann::json;

namespace {
constexpr std::size_t kLongestText = std::size_t{4} << 20;
constexpr int kLargestIndex = 1000000;
}  // namespace

tl::unexpected<Error> json_error(std::string_view what, std::string_view where, std::string_view why) {
  return fail(ErrorCode::InvalidArgument, "{}: {}{}{} -- correct or unset it", what, where, where.empty() ? "" : ": ",
              why);
}

Result<json> parse_json(std::string_view text, std::string_view what) {
  if (text.size() > kLongestText) return json_error(what, "", "a text of more than 4 MiB");
  if (is_too_deep(text)) return json_error(what, "", fmt::format("more than {} levels", kDeepestJson));
  try {
    return json::parse(text);
  } catch (const json::parse_error& error) {
    return json_error(what, "", fmt::format("no JSON, from character {} on", error.byte));
  } catch (const json::exception& error) {  // e.g. a number out of range
    return json_error(what, "", fmt::format("no JSON: {}", error.what()));
  }
}

Result<std::optional<std::string>> json_string(const json& object, std::string_view key, std::string_view what) {
  const auto found = object.find(key);
  if (found == object.end()) return std::optional<std::string>();
  if (!found->is_string()) return json_error(what, key, "no text");
  return found->get<std::string>();
}

Result<std::vector<std::string>> json_strings(const json& list, std::string_view where, std::string_view what) {
  if (!list.is_array()) return json_error(what, where, "no list");
  std::vector<std::string> texts;
  texts.reserve(list.size());
  for (const json& item : list) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty())
      return json_error(what, where, fmt::format("item {} is no text", texts.size()));
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

std::optional<int> json_index(const json& value) {
  std::optional<int> index;
  if (value.is_string()) {
    index = parse_integer<int>(value.get_ref<const std::string&>());
  } else if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number <= kLargestIndex) index = static_cast<int>(number);
  }
  return index && *index >= 0 && *index <= kLargestIndex ? index : std::nullopt;
}

}  // namespace cohort::cluster
