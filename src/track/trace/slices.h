// The events of a trace as people think of them: what lasted from when to when, on which rank's track. Times are of the
// common clock, since the beginning of all. The caller's thread.
#pragma once

#include "status/trace_encoder.h"
#include "track/trace/trace_set.h"

#include <cstdint>
#include <functional>
#include <string>

namespace cohort::track {

struct Slice {
  status::TrackId track;
  TraceEvent event;  ///< what stood at its beginning; `name` is below
  std::string name;
  std::int64_t begun_ns = 0;
  std::int64_t ended_ns = 0;  ///< of a moment the same
};

/// Of ranks, in the order of their ends. What was not ended, since the trace is torn, is left out.
void each_slice(const TraceSet& set, const HostPiece& piece, const std::function<void(const Slice&)>& take);

}  // namespace cohort::track
