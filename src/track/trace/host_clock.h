// What a trace says of a host's clock: how its times become times of all hosts. Between two measurements the offset is
// taken to change evenly, which takes out most of the drift. A plain value; the caller's thread.
#pragma once

#include "track/trace/trace_reader.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace cohort::track {

class HostClock {
 public:
  /// Events of the host's own track.
  void take(const TraceEvent& event);
  /// All have been taken.
  void settle();

  /// The trace says how this host's clock relates to that of the others.
  bool measured() const noexcept { return !offsets_.empty(); }
  /// What is 0 in the trace, by the host's clock; 0 where the trace does not say.
  std::int64_t base_ns() const noexcept { return base_ns_.value_or(0); }
  bool has_base() const noexcept { return base_ns_.has_value(); }
  /// A time of this host's CLOCK_MONOTONIC, by the clock that is common to all hosts.
  std::int64_t common_ns(std::int64_t host_ns) const noexcept;
  /// A time of day there, by its CLOCK_MONOTONIC; nullopt if the trace does not say.
  std::optional<std::int64_t> host_ns_of(std::int64_t realtime_ns) const noexcept;
  std::optional<std::int64_t> realtime_of(std::int64_t host_ns) const noexcept;
  /// Common times cannot be wrong by more where the clock drifts evenly.
  std::int64_t uncertainty_ns() const noexcept;
  std::int64_t offset_ns() const noexcept { return offsets_.empty() ? 0 : offsets_.front().offset_ns; }

 private:
  struct Offset {
    std::int64_t host_ns, offset_ns, uncertainty_ns;
  };
  struct Realtime {
    std::int64_t host_ns, realtime_ns;
  };
  std::optional<std::int64_t> base_ns_;
  std::vector<Offset> offsets_;     ///< by time
  std::vector<Realtime> realtime_;  ///< by time
};

}  // namespace cohort::track
