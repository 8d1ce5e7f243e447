// Reads run records back. Free functions, no state: any thread may call them.
#pragma once

#include "track/record_line.h"

#include <filesystem>
#include <string_view>
#include <vector>

namespace cohort::track {

struct RecordLines {
  std::vector<RecordLine> events;  ///< in the order of the file
  std::size_t damaged = 0;         ///< whole lines that are no event
  bool torn = false;               ///< the last line has no end: its writer was killed while writing
};

/// Never fails: what is no event is counted.
RecordLines parse_record(std::string_view text);
/// Throws Unavailable if there is no such file, Io if it cannot be read, Corrupt if it has lines but not one event.
RecordLines read_record(const std::filesystem::path& file);

/// Of the run; and what its launcher has warned of (warnings.jsonl beside it), each at its time's place.
RecordLines read_run(const std::filesystem::path& record);

enum class Absent { Error, Later };
/// "run.jsonl" of a run's folder; a path that is no folder as it is. For the folder of a run whose program has made no
/// record: throws Unavailable, where the record is not to come later.
std::filesystem::path record_of(const std::filesystem::path& run, Absent absent = Absent::Error);

}  // namespace cohort::track
