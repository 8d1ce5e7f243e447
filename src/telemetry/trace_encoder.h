// Events as Perfetto's trace packets, encoded here without a protobuf library. A file is a sequence of packets, so
// files can be concatenated, and readers ignore a last packet that a killed writer left incomplete. Each rank is a
// process with a track for each kind of event that may overlap. Each track is a packet sequence of its own with
// interned names, so an event takes about 26 bytes. Times are nanoseconds since the base that the clock packet names.
// One thread.
#pragma once

#include "telemetry/timeline.h"

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace cohort::status {

/// Numbers of the Perfetto fields used here; its schema never changes them.
namespace trace_field {
inline constexpr std::uint32_t kTracePacket = 1;
// TracePacket
inline constexpr std::uint32_t kClockSnapshot = 6, kTimestamp = 8, kSequence = 10, kTrackEvent = 11, kInterned = 12,
                               kSequenceFlags = 13, kDefaults = 59, kTrackDescriptor = 60;
inline constexpr std::uint64_t kStateCleared = 1, kNeedsState = 2;
// ClockSnapshot.clocks, and the clocks
inline constexpr std::uint32_t kClocks = 1, kClockId = 1, kClockTime = 2;
inline constexpr std::uint64_t kRealtime = 1, kBoottime = 6;
// TracePacketDefaults.track_event_defaults.track_uuid
inline constexpr std::uint32_t kTrackEventDefaults = 11;
// TrackDescriptor
inline constexpr std::uint32_t kUuid = 1, kTrackName = 2, kProcess = 3, kParent = 5, kCounter = 8, kChildOrdering = 11,
                               kRankAmongSiblings = 12;
inline constexpr std::uint64_t kExplicitOrder = 3;
inline constexpr std::uint32_t kPid = 1, kProcessName = 6, kUnit = 3;
inline constexpr std::uint64_t kUnitBytes = 3;
// TrackEvent
inline constexpr std::uint32_t kAnnotation = 4, kType = 9, kNameId = 10, kTrack = 11, kName = 23, kCounterValue = 30,
                               kFlow = 47;
inline constexpr std::uint64_t kBegin = 1, kEnd = 2, kInstant = 3, kCounterType = 4;
// DebugAnnotation
inline constexpr std::uint32_t kAnnotationNameId = 1, kUnsigned = 3, kSigned = 4, kAnnotationName = 10;
// InternedData and its entries
inline constexpr std::uint32_t kEventNames = 2, kAnnotationNames = 3, kIid = 1, kInternedName = 2;
}  // namespace trace_field

/// Names of annotations, by which Cohort's own reader finds them.
namespace trace_name {
inline constexpr std::string_view kBytes = "bytes", kWaited = "waited_ns", kWireBytes = "wire_bytes",
                                  kWireTime = "wire_us", kNumber = "number", kFailed = "failed", kLost = "events_lost",
                                  kHostTime = "host_ns", kRealtime = "realtime_ns", kOffset = "offset_ns",
                                  kUncertainty = "uncertainty_ns";
inline constexpr std::string_view kClockMeasured = "clock measured", kClocks = "clocks";
}  // namespace trace_name

/// Appends the fields of one message.
class ProtoWriter {
 public:
  explicit ProtoWriter(std::string& out) noexcept : out_(out) {}
  ProtoWriter& number(std::uint32_t field, std::uint64_t value);
  ProtoWriter& fixed32(std::uint32_t field, std::uint32_t value);
  ProtoWriter& fixed64(std::uint32_t field, std::uint64_t value);
  ProtoWriter& bytes(std::uint32_t field, std::string_view value);

 private:
  void varint(std::uint64_t value);
  std::string& out_;
};

/// Appends one whole packet with these fields.
void append_packet(std::string& trace, std::string_view fields);
/// Makes a text valid for a protobuf string: bytes that are not UTF-8 become '?'.
std::string valid_text(std::string_view text);

/// Kind of a track. The numbers are part of track uuids.
enum class TraceTrack : std::uint8_t { Process, Steps, Buckets, Checkpoints, Operations, Named, Thread, InFlight };

/// Identity of a track. The uuid contains rank and kind, so readers need no other description.
struct TrackId {
  std::uint32_t rank = 0;
  std::uint16_t epoch = 0;  ///< how often the ranks had been restarted
  TraceTrack kind = TraceTrack::Process;
  std::uint16_t lane = 0;  ///< number among the rank's tracks of this kind

  /// Returns a uuid from 1 to 2^61 - 1; tracks of hosts and of other programs have larger ones.
  std::uint64_t uuid() const noexcept {
    return (std::uint64_t{rank} + 1) << 28 | std::uint64_t{epoch & 0xfffU} << 16 |
           std::uint64_t{static_cast<std::uint8_t>(kind)} << 12 | std::uint64_t{lane & 0xfffU};
  }
  static TrackId of(std::uint64_t uuid) noexcept {
    return {static_cast<std::uint32_t>((uuid >> 28) - 1), static_cast<std::uint16_t>(uuid >> 16 & 0xfff),
            static_cast<TraceTrack>(uuid >> 12 & 0xf), static_cast<std::uint16_t>(uuid & 0xfff)};
  }
};
/// First uuids of tracks of other programs, and of hosts.
inline constexpr std::uint64_t kExternalTracks = std::uint64_t{1} << 61;
inline constexpr std::uint64_t kHostTracks = std::uint64_t{1} << 62;

/// A track and its packet sequence: the state that its packets share.
class TrackEncoder {
 public:
  TrackEncoder() = default;
  TrackEncoder(std::uint64_t sequence, std::uint64_t uuid) noexcept : sequence_(sequence), uuid_(uuid) {}

  struct Title {
    std::uint64_t parent = 0;
    std::string_view name;
    std::uint64_t order = 0;
    bool counts_bytes = false;
  };
  void append_description(std::string& trace, const Title& title) const;
  /// Return the fields of an event, for `append`, and intern its name.
  std::string begin(std::string_view name);
  std::string instant(std::string_view name);
  static std::string end();
  static std::string count(std::int64_t value);
  void annotate(std::string& event, std::string_view name, std::uint64_t value);
  void append(std::string& trace, std::uint64_t time_ns, std::string_view event);

 private:
  std::string named(std::uint64_t type, std::string_view name);
  std::uint64_t intern(std::uint32_t field, std::string_view name);

  std::uint64_t sequence_ = 0;
  std::uint64_t uuid_ = 0;
  std::map<std::string, std::uint64_t, std::less<>> names_, annotations_;
  std::string new_names_;  ///< to be interned by the next packet
  bool begun_ = false;
};

/// Appends a process, the parent of tracks. `pid` distinguishes processes in Perfetto.
void append_process(std::string& trace, std::uint64_t uuid, std::uint64_t pid, std::string_view name);

/// One rank's events, as packets.
class RankTrace {
 public:
  struct Options {
    std::uint32_t rank = 0;
    std::uint16_t epoch = 0;
    std::string host;
    std::int32_t pid = 0;
    std::int64_t base_ns = 0;  ///< CLOCK_MONOTONIC time that is 0 in the trace
  };
  explicit RankTrace(Options options);

  /// Appends this event's packets. `name`: from TimelineReader::name.
  void append(std::string& trace, const TimelineEntry& entry, std::string_view name);
  /// Appends a mark for events that were lost because the ring was full.
  void append_lost(std::string& trace, std::int64_t at_ns, std::uint64_t events);

 private:
  struct Track {
    TrackEncoder encoder;
    std::int64_t ended_ns = 0;
  };
  Track& track(std::string& trace, TraceTrack kind, std::uint16_t lane, std::string_view title);
  Track& place(std::string& trace, const TimelineEntry& entry, bool& free);
  std::uint64_t time_of(std::int64_t at_ns) const noexcept;

  const Options options_;
  std::map<std::pair<TraceTrack, std::uint16_t>, Track> tracks_;
  std::map<std::uint32_t, std::uint16_t> threads_;  ///< lane of each thread, by its number
};

/// A host's clock, as events on a track of its own.
struct HostTrace {
  int index = 0;
  std::string name;

  std::uint64_t uuid() const noexcept { return kHostTracks + static_cast<std::uint64_t>(index); }
  void append_description(std::string& trace) const;
  /// Appends a measurement: the host's clock is `offset_ns` ahead of the supervisor's, plus or minus the uncertainty.
  void append_offset(std::string& trace, std::int64_t base_ns, std::int64_t host_ns, std::int64_t offset_ns,
                     std::int64_t uncertainty_ns) const;
  /// Appends readings of this host's clocks at one moment. `base_ns`: as in RankTrace.
  void append_clocks(std::string& trace, std::int64_t base_ns, std::int64_t monotonic_ns,
                     std::int64_t realtime_ns) const;

 private:
  void append_instant(std::string& trace, std::uint64_t time_ns, std::string_view title,
                      std::initializer_list<std::pair<std::string_view, std::int64_t>> annotations) const;
};

}  // namespace cohort::status
