// The table [run] of a TOML file, as texts: what stands there and in which line. Which keys there are is not known
// here. Pure; any thread.
#pragma once

#include "base/result.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

struct ConfigEntry {
  std::string key;
  /// One text; of a list each element's; of a table "NAME=value" for each entry. Numbers and truth values as TOML
  /// writes them.
  std::vector<std::string> values;
  bool is_list = false;
  int line = 0;
};

/// The entries of [run], in the order of their lines. Fails with InvalidArgument, naming `name` and the line, on what
/// is not TOML, on anything outside [run], and on values that are neither texts, numbers, truth values nor lists of
/// them.
Result<std::vector<ConfigEntry>> parse_config(std::string_view text, const std::string& name);

/// The file's. Fails with Io where it cannot be read.
Result<std::vector<ConfigEntry>> read_config(const std::string& path);

/// As TOML writes a text: "a\"b".
std::string toml_text(std::string_view text);

}  // namespace cohort::launch
