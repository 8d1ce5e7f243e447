// Summary of a run's trace in numbers: which rank was late, how much of the communication the program had to wait for,
// the bytes sent between hosts, the longest operations. Free functions that run on the caller's thread.
#pragma once

#include "observe/trace/trace_set.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cohort::track {

struct RankFigures {
  std::uint32_t rank = 0;
  std::string host;
  std::int64_t steps = 0;   ///< number of steps with a known beginning, which the first lacks
  double step_seconds = 0;  ///< total duration of these steps
  double seconds = 0;       ///< from the beginning of the first step to the end of the last; without steps, from its
                            ///< first to its last event
  double communication_seconds = 0;  ///< time within `seconds` in which operations were under way
  double exposed_seconds = 0;        ///< time in which a thread of the program only waited for operations
  double hidden_seconds = 0;         ///< communication that was not waited for
  double waited_seconds = 0;         ///< time that operations waited for other ranks to start them
  std::int64_t last = 0;             ///< number of operations that this rank was the last to start
  double made_wait_seconds = 0;      ///< total delay of these after the second-last rank
  std::uint64_t bytes = 0;
  std::uint64_t wire_bytes = 0;  ///< bytes sent to other hosts
  double wire_seconds = 0;       ///< time of sending to other hosts, and of waiting for their bytes
  std::uint64_t lost = 0;        ///< events that were not recorded
};

struct OperationFigures {
  std::string name;
  std::uint64_t bytes = 0;  ///< bytes of each operation
  std::int64_t count = 0;   ///< number over all ranks
  double seconds = 0;
  double waited_seconds = 0;
};

struct HostFigures {
  std::string host;
  bool measured = false;  ///< true: clock offsets were measured
  std::int64_t offset_ns = 0;
  std::int64_t uncertainty_ns = 0;
};

struct TraceReport {
  std::vector<RankFigures> ranks;            ///< by rank
  std::vector<OperationFigures> operations;  ///< sorted by time
  std::vector<HostFigures> hosts;
  std::vector<std::string> remarks;
};

TraceReport make_report(const TraceSet& set);
std::string to_text(const TraceReport& report);
std::string to_json(const TraceReport& report);

}  // namespace cohort::track
