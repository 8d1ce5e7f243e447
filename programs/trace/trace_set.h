// Reads packets of Perfetto's format, as far as Cohort writes it. Accepts any bytes: the trace ends at a torn end,
// invalid packets are counted, and unknown fields are skipped. The text has to outlive the reader. One thread.
#pragma once

#include "base/files.h"
#include "base/result.h"
#include "telemetry/trace_encoder.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cohort::track {

/// Iterates over the fields of a message.
class ProtoReader {
 public:
  explicit ProtoReader(std::string_view message) noexcept : rest_(message) {}

  /// Returns false at the end, and if the rest is invalid: then `broken` is true.
  bool next();
  bool broken() const noexcept { return broken_; }
  std::uint32_t field() const noexcept { return field_; }
  /// The field's number; for a fixed64 its bits.
  std::uint64_t number() const noexcept { return number_; }
  /// The field's bytes, if it is a text or a message.
  std::string_view bytes() const noexcept { return bytes_; }
  /// The encoded field, with its tag.
  std::string_view raw() const noexcept { return raw_; }

 private:
  std::optional<std::uint64_t> varint();

  std::string_view rest_;
  std::string_view raw_;
  std::string_view bytes_;
  std::uint64_t number_ = 0;
  std::uint32_t field_ = 0;
  bool broken_ = false;
};

struct TraceEvent {
  enum class Type { Begin, End, Instant, Counter };
  Type type = Type::Instant;
  std::uint64_t track = 0;
  std::int64_t time_ns = 0;
  std::string_view name;  ///< valid until the reader's next call
  std::uint64_t flow = 0;
  std::uint64_t bytes = 0, waited_ns = 0, wire_bytes = 0, wire_us = 0, number = 0, lost = 0;
  bool failed = false;
  std::optional<std::int64_t> host_ns, realtime_ns, offset_ns;
  std::int64_t uncertainty_ns = 0;
};

struct TraceDescription {
  std::uint64_t uuid = 0;
  std::string_view name;     ///< of a track
  std::string_view process;  ///< of a process
};

class TraceReader {
 public:
  explicit TraceReader(std::string_view trace) noexcept : packets_(trace) {}

  /// Reads the next packet; returns false at the end.
  bool next();
  /// The packet's fields.
  std::string_view packet() const noexcept { return packet_; }
  const std::optional<TraceEvent>& event() const noexcept { return event_; }
  const std::optional<TraceDescription>& description() const noexcept { return description_; }

  /// Number of invalid packets, which were skipped.
  std::uint64_t damaged() const noexcept { return damaged_; }
  /// True if the trace ends in the middle of a packet.
  bool torn() const noexcept { return packets_.broken(); }

 private:
  struct Sequence {
    std::unordered_map<std::uint64_t, std::string> names, annotations;
    std::uint64_t track = 0;
  };
  bool decode(std::string_view packet);
  bool read_interned(Sequence& sequence, std::string_view interned) const;
  bool read_event(const Sequence& sequence, std::string_view text);
  bool read_annotation(const Sequence& sequence, std::string_view text);
  bool read_description(std::string_view text);

  ProtoReader packets_;
  std::string_view packet_;
  std::optional<TraceEvent> event_;
  std::optional<TraceDescription> description_;
  std::map<std::uint64_t, Sequence> sequences_;
  std::uint64_t damaged_ = 0;
};

// Clock of a host as its trace records it, and the conversion of its times to times common to all hosts. Between two
// measurements the offset is assumed to change linearly, which removes most of the drift. A plain value; the caller's
// thread.

class HostClock {
 public:
  /// Takes an event of the host's own track.
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
  /// There have to be entries.
  const Realtime& nearest(std::int64_t Realtime::*clock, std::int64_t ns) const noexcept;

  std::optional<std::int64_t> base_ns_;
  std::vector<Offset> offsets_;     ///< by time
  std::vector<Realtime> realtime_;  ///< by time
};

// The traces of a run, one per host, with their clocks; read from the run's folder or named one by one. Their bytes are
// read when needed, since they may be large. Plain data; the caller's thread.

struct HostPiece {
  std::filesystem::path file;
  std::string host;  ///< empty: unknown
  HostClock clock;
  std::map<std::uint32_t, std::string> processes;  ///< names of ranks, from their tracks
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
/// file, if it is no trace of Cohort's.
TraceSet open_traces(const std::filesystem::path& run);
sys::FileBytes read_trace(const HostPiece& piece);
/// Remarks for people on traces that are incomplete.
std::vector<std::string> remarks_on(const TraceSet& set);

// Slices of a trace: a name with its beginning and end, on a rank's track. Times are of the common clock, since the
// beginning of all traces. The caller's thread.

struct Slice {
  status::TrackId track;
  TraceEvent event;  ///< its begin event; `name` is below
  std::string name;
  std::int64_t begun_ns = 0;
  std::int64_t ended_ns = 0;  ///< for an instant, its time
};

/// Passes the slices of ranks to `take`, in the order of their ends. Skips slices without an end, as in a torn trace.
void each_slice(const TraceSet& set, const HostPiece& piece, const std::function<void(const Slice&)>& take);

}  // namespace cohort::track
