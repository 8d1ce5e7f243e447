// Merges the traces of a run's hosts into one: converts times to the common clock, adds the traces of other programs
// (torch's profiler, Horovod's timeline), and the bytes that each rank had in flight. Free functions that run on the
// caller's thread.
#pragma once

#include "observe/trace/trace_set.h"

#include <cstddef>
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
  std::map<Row, std::vector<ChromeSlice>> rows;     ///< by beginning; a nested slice comes after the one around it
  std::map<Row, std::string> names;
};

/// Reads a list of events, or an object with such a list. Throws Unavailable, Io, or Corrupt, naming the file, if it is
/// no such trace or lacks the time of day.
ChromeTrace read_chrome_trace(const std::filesystem::path& file);
ChromeTrace parse_chrome_trace(std::string_view text, const std::filesystem::path& file);

/// Bytes collected before a write.
inline constexpr std::size_t kMergeBuffer = std::size_t{1} << 20;

struct MergeSummary {
  std::uint64_t events = 0;
  int ranks = 0;
  std::vector<std::string> remarks;  ///< remarks on incomplete traces
};

/// Writes a file of all ranks, or, if `output` is a folder, one for each rank: rank-R.json. Replaces files atomically.
/// Throws Io; InvalidArgument if another program's trace belongs to no rank of this run, or if its host's time of day
/// is unknown.
MergeSummary merge_traces(const TraceSet& set, const std::vector<ChromeTrace>& others,
                          const std::filesystem::path& output);

/// Converts another program's times of day to times in the trace of a run.
class Placed {
 public:
  /// Both arguments have to outlive this object. Throws InvalidArgument if the run has no such rank, or if the time of
  /// day on its host is unknown.
  Placed(const TraceSet& set, const ChromeTrace& trace);
  /// Returns nanoseconds since the beginning of all traces.
  std::int64_t operator()(std::int64_t realtime_ns) const;

 private:
  const TraceSet& set_;
  const HostPiece* piece_;
};

}  // namespace cohort::track
