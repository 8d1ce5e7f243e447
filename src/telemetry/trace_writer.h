// Events in Chrome's Trace Event Format, which Perfetto and chrome://tracing read: a list of JSON objects, one on each
// line. Events are appended to a file as they come, since the format allows the list's end to be missing. The last line
// may be torn if the writer was killed. Each rank is a process with a row ("thread") for each kind of event that may
// overlap. Times are nanoseconds since a base; in the file, microseconds. One thread.
#pragma once

#include "telemetry/timeline.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cohort::status {

/// Kind of a row. The numbers are part of thread numbers in the file.
enum class TraceTrack : std::uint8_t { Process, Steps, Buckets, Checkpoints, Operations, Named, Thread };

/// Category of a row's events in the file.
std::string_view category_of(TraceTrack kind) noexcept;

/// Identity of a row, as the numbers of its process and thread in the file.
struct TrackId {
  std::uint32_t rank = 0;
  std::uint16_t epoch = 0;  ///< number of earlier restarts of the ranks
  TraceTrack kind = TraceTrack::Process;
  std::uint16_t lane = 0;  ///< number among the rank's rows of this kind

  std::uint64_t tid() const noexcept {
    return std::uint64_t{epoch} << 16 | std::uint64_t{static_cast<std::uint8_t>(kind)} << 12 |
           std::uint64_t{lane & 0xfffU};
  }
  static TrackId of(std::uint64_t pid, std::uint64_t tid) noexcept {
    return {static_cast<std::uint32_t>(pid), static_cast<std::uint16_t>(tid >> 16),
            static_cast<TraceTrack>(tid >> 12 & 0xf), static_cast<std::uint16_t>(tid & 0xfff)};
  }
};
/// First process numbers of hosts, and of other programs' traces. Smaller numbers are ranks.
inline constexpr std::uint64_t kHostPids = std::uint64_t{1} << 29;
inline constexpr std::uint64_t kExternalPids = std::uint64_t{1} << 30;

struct TraceEvent {
  std::uint64_t pid = 0, tid = 0;
  std::string_view name;
  std::string_view category = {};
  std::int64_t begun_ns = 0, ended_ns = 0;
  bool moment = false;       ///< an event without a duration
  std::uint64_t flow = 0;    ///< number of a collective, the same on all ranks; 0: none
  bool begins_flow = false;  ///< true: the flow's arrows begin here; false: one arrives here
  std::uint64_t bytes = 0, waited_ns = 0, wire_bytes = 0, wire_us = 0, number = 0, failed = 0, lost = 0;
  std::string_view error = {};
  std::optional<std::int64_t> host_ns = {}, realtime_ns = {}, offset_ns = {}, uncertainty_ns = {};
};

/// Calls `visit(name, field)` for each argument of an event, in the order of the file.
template <class Event, class Visit>
void visit_arguments(Event& event, const Visit& visit) {
  visit("bytes", event.bytes);
  visit("waited_ns", event.waited_ns);
  visit("wire_bytes", event.wire_bytes);
  visit("wire_us", event.wire_us);
  visit("number", event.number);
  visit("failed", event.failed);
  visit("events_lost", event.lost);
  visit("host_ns", event.host_ns);
  visit("realtime_ns", event.realtime_ns);
  visit("offset_ns", event.offset_ns);
  visit("uncertainty_ns", event.uncertainty_ns);
}

// Each of these functions appends a comma, a line break and one object. A file begins with "[" and the first object
// without its comma (`begin_list`); to end the file, "\n]" may be appended.

void append_event(std::string& trace, const TraceEvent& event);
/// Appends a number that changes over time.
void append_counter(std::string& trace, std::uint64_t pid, std::string_view name, std::int64_t at_ns,
                    std::int64_t value);
/// Append the name of a process or row, and its position among the others.
void append_process(std::string& trace, std::uint64_t pid, std::string_view name);
void append_row(std::string& trace, std::uint64_t pid, std::uint64_t tid, std::string_view name, std::uint64_t order);
/// Returns the beginning of a file with these events.
std::string begin_list(std::string_view events);

/// One rank's events.
class RankTrace {
 public:
  struct Options {
    std::uint32_t rank = 0;
    std::uint16_t epoch = 0;
    std::string host;
    std::int32_t pid = 0;
    std::int64_t base_ns = 0;  ///< CLOCK_MONOTONIC time that is 0 in the trace
  };
  explicit RankTrace(Options options) : options_(std::move(options)) {}

  /// Appends this event. `name`: from TimelineReader::name.
  void append(std::string& trace, const TimelineEntry& entry, std::string_view name);
  /// Appends a mark for events that were lost because the ring was full.
  void append_lost(std::string& trace, std::int64_t at_ns, std::uint64_t events);

 private:
  struct Row {
    std::uint64_t tid = 0;
    std::int64_t ended_ns = 0;
  };
  Row& row(std::string& trace, TraceTrack kind, std::uint16_t lane, std::string_view title);
  Row& place(std::string& trace, const TimelineEntry& entry, bool& free);
  std::int64_t time_of(std::int64_t at_ns) const noexcept;

  const Options options_;
  std::map<std::pair<TraceTrack, std::uint16_t>, Row> rows_;
  std::map<std::uint32_t, std::uint16_t> threads_;  ///< lane of each thread, by its number
};

/// A host's clock, as events of a separate process.
struct HostTrace {
  int index = 0;
  std::string name;

  std::uint64_t pid() const noexcept { return kHostPids + static_cast<std::uint64_t>(index); }
  void append_description(std::string& trace) const;
  /// Appends a measurement: the host's clock is `offset_ns` ahead of the supervisor's, plus or minus the uncertainty.
  void append_offset(std::string& trace, std::int64_t base_ns, std::int64_t host_ns, std::int64_t offset_ns,
                     std::int64_t uncertainty_ns) const;
  /// Appends readings of this host's clocks at one moment. `base_ns`: as in RankTrace.
  void append_clocks(std::string& trace, std::int64_t base_ns, std::int64_t monotonic_ns,
                     std::int64_t realtime_ns) const;
};

}  // namespace cohort::status
