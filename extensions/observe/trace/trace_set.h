// Reads a host's trace in Cohort's format, with an event on each line. Accepts any bytes; a torn line ends the trace,
// and lines that are no events are counted. The text has to outlive the reader. One thread.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "telemetry/trace_writer.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::track {

using status::TraceEvent;

/// The name of a process or row, or its position among the others.
struct TraceDescription {
  std::uint64_t pid = 0;
  bool names_process = false;
  std::string text = {};  ///< the name
};

class TraceReader {
 public:
  explicit TraceReader(std::string_view trace) noexcept : rest_(trace) {}

  /// Reads the next line; returns false at the end.
  bool next();
  /// The line with the event's object.
  std::string_view line() const noexcept { return line_; }
  const std::optional<TraceEvent>& event() const noexcept { return event_; }  ///< texts valid until the next call
  const std::optional<TraceDescription>& description() const noexcept { return description_; }

  /// Number of lines that were skipped because they make no sense.
  std::uint64_t damaged() const noexcept { return damaged_; }
  /// True if the trace ends in the middle of an event.
  bool torn() const noexcept { return torn_; }

 private:
  bool decode();

  std::string_view rest_, line_;
  std::string name_;
  std::optional<TraceEvent> event_;
  std::optional<TraceDescription> description_;
  std::uint64_t damaged_ = 0;
  bool torn_ = false;
};

// Clock of a host as its trace records it, and the conversion of its times to times common to all hosts. Between two
// measurements the offset is assumed to change linearly, which removes most of the drift. A plain value; the caller's
// thread.

class HostClock {
 public:
  /// Takes an event from the host's own track.
  void take(const TraceEvent& event);
  /// Call it after the last event.
  void settle();

  /// True if the trace has this host's clock offset to the others.
  bool measured() const noexcept { return !offsets_.empty(); }
  /// Time of the host's clock that is 0 in the trace; 0 if unknown.
  std::int64_t base_ns() const noexcept { return base_ns_.value_or(0); }
  bool has_base() const noexcept { return base_ns_.has_value(); }
  /// Converts a time of this host's CLOCK_MONOTONIC to the clock common to all hosts.
  std::int64_t common_ns(std::int64_t host_ns) const noexcept;
  /// Converts a time of day on this host to its CLOCK_MONOTONIC; nullopt if the trace lacks the time of day.
  std::optional<std::int64_t> host_ns_of(std::int64_t realtime_ns) const noexcept;
  std::optional<std::int64_t> realtime_of(std::int64_t host_ns) const noexcept;
  /// Largest error of common times if the clock drifts evenly.
  std::int64_t uncertainty_ns() const noexcept;
  std::int64_t offset_ns() const noexcept { return offsets_.empty() ? 0 : offsets_.front().offset_ns; }

 private:
  struct Offset {
    std::int64_t host_ns, offset_ns, uncertainty_ns;
  };
  struct Realtime {
    std::int64_t host_ns, realtime_ns;
  };
  /// Requires entries.
  const Realtime& nearest(std::int64_t Realtime::*clock, std::int64_t ns) const noexcept;

  std::optional<std::int64_t> base_ns_;
  std::vector<Offset> offsets_;     ///< by time
  std::vector<Realtime> realtime_;  ///< by time
};

// The traces of a run, one per host, with their clocks; read from the run's folder or named one by one. Their bytes are
// read when needed, since they may be large. Plain data, used on the caller's thread.

struct HostPiece {
  std::filesystem::path file;
  std::string host;  ///< empty: unknown
  HostClock clock;
  std::map<std::uint32_t, std::string> processes;  ///< names of ranks
  std::uint64_t damaged = 0;
  bool torn = false;

  /// Converts a time of the trace to nanoseconds since the beginning of all traces.
  std::int64_t common_ns(std::int64_t time_ns, std::int64_t zero_ns) const noexcept;
};

struct TraceSet {
  std::vector<HostPiece> pieces;
  std::int64_t zero_ns = 0;  ///< common time at which the earliest trace begins

  const HostPiece* of_rank(std::uint32_t rank) const;
};

/// `run` is a run's folder, or one host's trace. Throws Unavailable if there is no trace, Io, and Corrupt, naming the
/// file, if it is no trace by Cohort.
TraceSet open_traces(const std::filesystem::path& run);
sys::FileBytes read_trace(const HostPiece& piece);
/// Remarks for people on traces that are incomplete.
std::vector<std::string> remarks_on(const TraceSet& set);

/// An event on a rank's row. Times are on the common clock, from the beginning of all traces.
struct Slice {
  status::TrackId track;
  const TraceEvent& event;
  std::int64_t begun_ns = 0;
  std::int64_t ended_ns = 0;  ///< for an instant event, its time
};

/// Passes the events of ranks to `take`, in the order of their ends.
void each_slice(const TraceSet& set, const HostPiece& piece, const std::function<void(const Slice&)>& take);

}  // namespace cohort::track
