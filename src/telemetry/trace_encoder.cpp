#include "telemetry/trace_encoder.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::status {
namespace {

namespace field = trace_field;

/// Most lanes of one kind for overlapping events of a rank: nobody would look at more.
constexpr std::uint16_t kMostLanes = 16;
constexpr std::uint16_t kMostThreads = 40;
/// Most tracks of a rank: above the sum of the lanes of all kinds.
constexpr std::size_t kMostTracks = 127;
constexpr std::uint64_t kHostSequences = std::uint64_t{1} << 31;

std::uint64_t order_of(TraceTrack kind) {
  switch (kind) {
    case TraceTrack::Process:
    case TraceTrack::Steps: return 0;
    case TraceTrack::Thread: return 1;
    case TraceTrack::Buckets: return 2;
    case TraceTrack::Operations: return 3;
    case TraceTrack::Named: return 4;
    case TraceTrack::Checkpoints: return 5;
    case TraceTrack::InFlight: return 6;
  }
  return 7;
}

std::uint64_t since(std::int64_t base_ns, std::int64_t at_ns) {
  return at_ns > base_ns ? static_cast<std::uint64_t>(at_ns) - static_cast<std::uint64_t>(base_ns) : 0;
}

}  // namespace

void ProtoWriter::varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out_ += static_cast<char>(value | 0x80);
  out_ += static_cast<char>(value);
}

ProtoWriter& ProtoWriter::number(std::uint32_t field, std::uint64_t value) {
  varint(std::uint64_t{field} << 3);
  varint(value);
  return *this;
}

ProtoWriter& ProtoWriter::fixed32(std::uint32_t field, std::uint32_t value) {
  varint(std::uint64_t{field} << 3 | 5);
  for (int byte = 0; byte < 4; ++byte) out_ += static_cast<char>(value >> 8 * byte);
  return *this;
}

ProtoWriter& ProtoWriter::fixed64(std::uint32_t field, std::uint64_t value) {
  varint(std::uint64_t{field} << 3 | 1);
  for (int byte = 0; byte < 8; ++byte) out_ += static_cast<char>(value >> 8 * byte);
  return *this;
}

ProtoWriter& ProtoWriter::bytes(std::uint32_t field, std::string_view value) {
  varint(std::uint64_t{field} << 3 | 2);
  varint(value.size());
  out_ += value;
  return *this;
}

void append_packet(std::string& trace, std::string_view fields) {
  ProtoWriter(trace).bytes(field::kTracePacket, fields);
}

std::string valid_text(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    out += length > 0 ? text.substr(0, length) : "?";
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

namespace {

/// Returns the flow of a collective, the same on all ranks; 0 if unknown.
std::uint64_t flow_of(std::uint32_t group, std::uint64_t sequence) noexcept {
  if (group == 0 || sequence == 0) return 0;
  std::uint64_t mixed = (std::uint64_t{group} << 32) + sequence * 0x9e3779b97f4a7c15ULL;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebULL;
  return mixed ^ mixed >> 31;
}

}  // namespace

void TrackEncoder::append_description(std::string& trace, const Title& title) const {
  std::string track, packet;
  ProtoWriter out(track);
  out.number(field::kUuid, uuid_).bytes(field::kTrackName, valid_text(title.name));
  if (title.counts_bytes) {
    std::string unit;
    ProtoWriter(unit).number(field::kUnit, field::kUnitBytes);
    out.bytes(field::kCounter, unit);
  }
  if (title.parent != 0) out.number(field::kParent, title.parent).number(field::kRankAmongSiblings, title.order);
  ProtoWriter(packet).bytes(field::kTrackDescriptor, track);
  append_packet(trace, packet);
}

std::uint64_t TrackEncoder::intern(std::uint32_t field, std::string_view name) {
  auto& known = field == field::kEventNames ? names_ : annotations_;
  if (const auto found = known.find(name); found != known.end()) return found->second;
  const std::uint64_t id = known.size() + 1;
  known.emplace(name, id);
  std::string entry;
  ProtoWriter(entry).number(field::kIid, id).bytes(field::kInternedName, valid_text(name));
  ProtoWriter(new_names_).bytes(field, entry);
  return id;
}

std::string TrackEncoder::named(std::uint64_t type, std::string_view name) {
  std::string event;
  ProtoWriter(event).number(field::kType, type).number(field::kNameId, intern(field::kEventNames, name));
  return event;
}

std::string TrackEncoder::begin(std::string_view name) { return named(field::kBegin, name); }
std::string TrackEncoder::instant(std::string_view name) { return named(field::kInstant, name); }

std::string TrackEncoder::end() {
  std::string event;
  ProtoWriter(event).number(field::kType, field::kEnd);
  return event;
}

std::string TrackEncoder::count(std::int64_t value) {
  std::string event;
  ProtoWriter(event)
      .number(field::kType, field::kCounterType)
      .number(field::kCounterValue, static_cast<std::uint64_t>(value));
  return event;
}

void TrackEncoder::annotate(std::string& event, std::string_view name, std::uint64_t value) {
  if (value == 0) return;
  std::string annotation;
  ProtoWriter(annotation)
      .number(field::kAnnotationNameId, intern(field::kAnnotationNames, name))
      .number(field::kUnsigned, value);
  ProtoWriter(event).bytes(field::kAnnotation, annotation);
}

void TrackEncoder::append(std::string& trace, std::uint64_t time_ns, std::string_view event) {
  std::string packet;
  ProtoWriter out(packet);
  out.number(field::kTimestamp, time_ns).number(field::kSequence, sequence_);
  if (!begun_) {
    std::string track, defaults;
    ProtoWriter(track).number(field::kTrack, uuid_);
    ProtoWriter(defaults).bytes(field::kTrackEventDefaults, track);
    out.bytes(field::kDefaults, defaults);
  }
  if (!new_names_.empty()) out.bytes(field::kInterned, new_names_);
  out.number(field::kSequenceFlags, field::kNeedsState | (begun_ ? 0 : field::kStateCleared));
  out.bytes(field::kTrackEvent, event);
  begun_ = true;
  new_names_.clear();
  append_packet(trace, packet);
}

void append_process(std::string& trace, std::uint64_t uuid, std::uint64_t pid, std::string_view name) {
  std::string about, track, packet;
  ProtoWriter(about).number(field::kPid, pid).bytes(field::kProcessName, valid_text(name));
  ProtoWriter(track)
      .number(field::kUuid, uuid)
      .bytes(field::kProcess, about)
      .number(field::kChildOrdering, field::kExplicitOrder);
  ProtoWriter(packet).bytes(field::kTrackDescriptor, track);
  append_packet(trace, packet);
}

RankTrace::RankTrace(Options options) : options_(std::move(options)) {}

std::uint64_t RankTrace::time_of(std::int64_t at_ns) const noexcept { return since(options_.base_ns, at_ns); }

RankTrace::Track& RankTrace::track(std::string& trace, TraceTrack kind, std::uint16_t lane, std::string_view title) {
  const std::uint64_t process = TrackId{options_.rank, options_.epoch, TraceTrack::Process, 0}.uuid();
  if (tracks_.empty()) {
    const std::string restart = options_.epoch == 0 ? "" : fmt::format(", restart {}", options_.epoch);
    // Perfetto distinguishes processes by number, and pids of different hosts may be equal.
    append_process(trace, process, (std::uint64_t{options_.epoch} << 20) + options_.rank + 1,
                   fmt::format("rank {} ({}, pid {}{})", options_.rank, options_.host, options_.pid, restart));
  }
  const auto [found, is_new] = tracks_.try_emplace({kind, lane});
  Track& track = found->second;
  if (!is_new) return track;
  track.encoder = TrackEncoder((std::uint64_t{options_.rank} + 1) << 7 | std::min(tracks_.size() - 1, kMostTracks),
                               TrackId{options_.rank, options_.epoch, kind, lane}.uuid());
  const bool bare = lane == 0 || kind == TraceTrack::Thread;
  track.encoder.append_description(trace, {process, bare ? std::string(title) : fmt::format("{} {}", title, lane + 1),
                                           order_of(kind) << 12 | lane, false});
  return track;
}

// Chooses an event's track. Slices of one track must be nested or disjoint; sets `free` to whether the event's slice
// is.
RankTrace::Track& RankTrace::place(std::string& trace, const TimelineEntry& entry, bool& free) {
  free = true;
  TraceTrack kind = TraceTrack::Operations;
  std::string_view title = "communication";
  switch (entry.kind) {
    case TimelineKind::Step: return track(trace, TraceTrack::Steps, 0, "steps");
    case TimelineKind::Wait:
    case TimelineKind::Span: {
      const auto [thread, is_new] = threads_.try_emplace(entry.lane, static_cast<std::uint16_t>(threads_.size()));
      const bool main = entry.lane == static_cast<std::uint32_t>(options_.pid);
      const auto lane = std::min<std::uint16_t>(thread->second, kMostThreads);
      return track(trace, TraceTrack::Thread, lane, main ? "program" : fmt::format("thread {}", entry.lane));
    }
    case TimelineKind::Bucket:
      kind = TraceTrack::Buckets;
      title = "buckets";
      break;
    case TimelineKind::Checkpoint:
      kind = TraceTrack::Checkpoints;
      title = "checkpoints";
      break;
    case TimelineKind::Named:
      kind = TraceTrack::Named;
      title = "named operations";
      break;
    case TimelineKind::Operation: break;
  }
  for (std::uint16_t lane = 0;; ++lane) {
    Track& found = track(trace, kind, lane, title);
    free = entry.begun_ns >= found.ended_ns;
    if (free || lane + 1 == kMostLanes) return found;
  }
}

void RankTrace::append(std::string& trace, const TimelineEntry& entry, std::string_view name) {
  bool free = true;
  Track& to = place(trace, entry, free);
  TrackEncoder& encoder = to.encoder;
  // An event for which no lane is free becomes an instant.
  const bool slice = free && (entry.ended_ns > entry.begun_ns || entry.kind == TimelineKind::Span);
  if (name.empty()) name = "(no room for its name)";
  std::string event = slice ? encoder.begin(name) : encoder.instant(name);
  encoder.annotate(event, trace_name::kBytes, entry.bytes);
  encoder.annotate(event, trace_name::kWaited, entry.waited_ns);
  encoder.annotate(event, trace_name::kWireBytes, entry.wire_bytes);
  encoder.annotate(event, trace_name::kWireTime, entry.wire_us);
  encoder.annotate(event, trace_name::kFailed, entry.failed ? 1 : 0);
  if (entry.kind == TimelineKind::Operation) {
    if (const std::uint64_t flow = flow_of(entry.lane, entry.number); flow != 0)
      ProtoWriter(event).fixed64(field::kFlow, flow);
  } else {
    encoder.annotate(event, trace_name::kNumber, entry.number);
  }
  encoder.append(trace, time_of(slice ? entry.begun_ns : entry.ended_ns), event);
  if (!slice) return;
  encoder.append(trace, time_of(entry.ended_ns), TrackEncoder::end());
  to.ended_ns = std::max(to.ended_ns, entry.ended_ns);
}

void RankTrace::append_lost(std::string& trace, std::int64_t at_ns, std::uint64_t events) {
  TrackEncoder& encoder = track(trace, TraceTrack::Steps, 0, "steps").encoder;
  std::string event = encoder.instant("events are missing before this");
  encoder.annotate(event, trace_name::kLost, events);
  encoder.append(trace, time_of(at_ns), event);
}

void HostTrace::append_description(std::string& trace) const {
  TrackEncoder(0, uuid()).append_description(trace, {0, "clock of " + name, 0, false});
}

void HostTrace::append_instant(std::string& trace, std::uint64_t time_ns, std::string_view title,
                               std::initializer_list<std::pair<std::string_view, std::int64_t>> annotations) const {
  std::string event, packet;
  ProtoWriter(event).number(field::kType, field::kInstant).number(field::kTrack, uuid()).bytes(field::kName, title);
  for (const auto& [name_of_one, value] : annotations) {
    std::string annotation;
    ProtoWriter(annotation)
        .bytes(field::kAnnotationName, name_of_one)
        .number(field::kSigned, static_cast<std::uint64_t>(value));
    ProtoWriter(event).bytes(field::kAnnotation, annotation);
  }
  ProtoWriter(packet)
      .number(field::kTimestamp, time_ns)
      .number(field::kSequence, kHostSequences + static_cast<std::uint64_t>(index))
      .bytes(field::kTrackEvent, event);
  append_packet(trace, packet);
}

void HostTrace::append_offset(std::string& trace, std::int64_t base_ns, std::int64_t host_ns, std::int64_t offset_ns,
                              std::int64_t uncertainty_ns) const {
  append_instant(
      trace, since(base_ns, host_ns), trace_name::kClockMeasured,
      {{trace_name::kHostTime, host_ns}, {trace_name::kOffset, offset_ns}, {trace_name::kUncertainty, uncertainty_ns}});
}

void HostTrace::append_clocks(std::string& trace, std::int64_t base_ns, std::int64_t monotonic_ns,
                              std::int64_t realtime_ns) const {
  append_instant(trace, since(base_ns, monotonic_ns), trace_name::kClocks,
                 {{trace_name::kHostTime, monotonic_ns}, {trace_name::kRealtime, realtime_ns}});
}

}  // namespace cohort::status
