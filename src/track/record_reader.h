// Reads run records back. Free functions, no state: any thread may call them.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace cohort::track {

struct RecordLines {
  std::vector<nlohmann::json> events;  ///< objects with a text under "event", in the order of the file
  std::size_t damaged = 0;             ///< whole lines that are no such object
  bool torn = false;                   ///< the last line has no end: its writer was killed while writing
};

/// Never fails: what is no event is counted.
RecordLines parse_record(std::string_view text);
/// Throws Unavailable if there is no such file, Io if it cannot be read, Corrupt if it has lines but not one event.
RecordLines read_record(const std::filesystem::path& file);

/// A number of an event, also one of the texts "NaN", "Infinity", "-Infinity"; nullopt if it is not there or no number.
std::optional<double> number_of(const nlohmann::json& event, std::string_view name);

}  // namespace cohort::track
