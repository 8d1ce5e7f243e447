// JSON of launchers, read strictly: what is not as it should be is an error that names the variable, the place and what
// was found. Used within this folder only. Pure; any thread.
#pragma once

#include "base/result.h"

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::cluster {

/// The whole text as one value. `what` names it in messages.
Result<nlohmann::json> parse_json(std::string_view text, std::string_view what);

/// "WHAT: WHERE: WHY -- ADVICE" without advice where there is none.
tl::unexpected<Error> json_error(std::string_view what, std::string_view where, std::string_view why);

/// The string under the key; nullopt if there is none.
Result<std::optional<std::string>> json_string(const nlohmann::json& object, std::string_view key,
                                               std::string_view what);

/// A list of strings, not empty ones.
Result<std::vector<std::string>> json_strings(const nlohmann::json& list, std::string_view where,
                                              std::string_view what);

/// A number from 0 to a million, or a text of one.
std::optional<int> json_index(const nlohmann::json& value);

}  // namespace cohort::cluster
