// One trace of all ranks: each host's times by the common clock, what other programs recorded of the same time beside
// them, and how many bytes each rank had under way. For Perfetto, or in Chrome's JSON as torch's profiler writes it.
// Free functions; the caller's thread.
#pragma once

#include "track/trace/chrome_events.h"
#include "track/trace/trace_set.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace cohort::track {

/// What is gathered before it is written.
inline constexpr std::size_t kMergeBuffer = std::size_t{1} << 20;

struct MergeSummary {
  std::uint64_t events = 0;
  int ranks = 0;
  std::vector<std::string> remarks;  ///< what is less than whole
};

/// Replaces `output` at once or not at all. Throws Io; InvalidArgument where another program's trace is of no rank of
/// this run, or where nothing is known of its host's time of day.
MergeSummary merge_traces(const TraceSet& set, const std::vector<ChromeTrace>& others,
                          const std::filesystem::path& output);

/// A file of all ranks; where `output` is a folder, one for each: rank-R.json.
MergeSummary merge_as_json(const TraceSet& set, const std::vector<ChromeTrace>& others,
                           const std::filesystem::path& output);

}  // namespace cohort::track
