// Where another program's times of day lie in the trace of a run. Values; the caller's thread.
#pragma once

#include "track/trace/chrome_events.h"
#include "track/trace/trace_set.h"

#include <cstdint>
#include <string>

namespace cohort::track {

class Placed {
 public:
  /// Both live as long. Throws InvalidArgument where the run has no such rank, or nothing is known of its time of day.
  Placed(const TraceSet& set, const ChromeTrace& trace);
  /// In nanoseconds since the beginning of all.
  std::int64_t operator()(std::int64_t realtime_ns) const;

 private:
  const TraceSet& set_;
  const HostPiece* piece_;
};

/// What a row is called.
std::string title_of(const ChromeTrace& trace, const ChromeTrace::Row& row);

}  // namespace cohort::track
