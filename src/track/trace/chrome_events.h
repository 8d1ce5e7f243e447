// Traces in Chrome's JSON, as torch's profiler (Kineto) and Horovod's timeline write them: a list of events, or an
// object with one. Free functions; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::track {

struct ChromeSlice {
  std::int64_t begun_ns = 0;  ///< time of day
  std::int64_t ended_ns = 0;
  std::string name;
};

struct ChromeTrace {
  std::filesystem::path file;
  std::optional<std::uint32_t> rank;
  std::string what;                                 ///< "torch profiler", "Horovod timeline"
  using Row = std::pair<std::string, std::string>;  ///< pid and tid
  std::map<Row, std::vector<ChromeSlice>> rows;     ///< by beginning; what lies within another comes after it
  std::map<Row, std::string> names;
  std::uint64_t left_out = 0;  ///< events of kinds that are not taken
};

/// Throws Unavailable, Io, or Corrupt, naming the file, for what is no such trace, or says nothing of the time of day.
ChromeTrace read_chrome_trace(const std::filesystem::path& file);
ChromeTrace parse_chrome_trace(std::string_view text, const std::filesystem::path& file);

}  // namespace cohort::track
