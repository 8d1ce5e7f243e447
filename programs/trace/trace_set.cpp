#include "trace/trace_set.h"

#include "telemetry/trace_encoder.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::track {
namespace {

namespace field = status::trace_field;
namespace name = status::trace_name;

/// Later than any clock's time, and small enough that sums of a few do not overflow.
constexpr std::uint64_t kLatest = std::uint64_t{1} << 60;

}  // namespace

std::optional<std::uint64_t> ProtoReader::varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    value |= std::uint64_t{byte & 0x7fU} << shift;
    if ((byte & 0x80) == 0) return value;
  }
  return std::nullopt;
}

bool ProtoReader::next() {
  if (broken_ || rest_.empty()) return false;
  const std::string_view begin = rest_;
  number_ = 0;
  bytes_ = {};
  broken_ = true;
  const auto tag = varint();
  if (!tag || *tag >> 3 == 0 || *tag >> 3 > 0x1fffffff) return false;
  field_ = static_cast<std::uint32_t>(*tag >> 3);
  std::size_t length = 0;
  switch (*tag & 7) {
    case 0: {
      const auto value = varint();
      if (!value) return false;
      number_ = *value;
      break;
    }
    case 1: length = 8; break;
    case 2: {
      const auto value = varint();
      if (!value || *value > rest_.size()) return false;
      length = static_cast<std::size_t>(*value);
      break;
    }
    case 5: length = 4; break;
    default: return false;
  }
  if (length > rest_.size()) return false;
  bytes_ = rest_.substr(0, length);
  if ((*tag & 7) == 1) std::memcpy(&number_, bytes_.data(), 8);
  rest_.remove_prefix(length);
  raw_ = begin.substr(0, begin.size() - rest_.size());
  broken_ = false;
  return true;
}

bool TraceReader::next() {
  while (packets_.next()) {
    if (packets_.field() != field::kTracePacket) {
      ++damaged_;
      continue;
    }
    if (decode(packets_.bytes())) return true;
    ++damaged_;
  }
  return false;
}

bool TraceReader::decode(std::string_view packet) {
  packet_ = packet;
  event_.reset();
  description_.reset();
  std::uint64_t time = 0, sequence_id = 0, flags = 0;
  std::string_view event, interned, defaults, description;
  bool has_event = false;
  ProtoReader fields(packet);
  while (fields.next()) {
    switch (fields.field()) {
      case field::kTimestamp: time = fields.number(); break;
      case field::kSequence: sequence_id = fields.number(); break;
      case field::kSequenceFlags: flags = fields.number(); break;
      case field::kInterned: interned = fields.bytes(); break;
      case field::kDefaults: defaults = fields.bytes(); break;
      case field::kTrackDescriptor: description = fields.bytes(); break;
      case field::kTrackEvent:
        event = fields.bytes();
        has_event = true;
        break;
      default: break;
    }
  }
  if (fields.broken()) return false;
  Sequence& sequence = sequences_[sequence_id];
  if ((flags & field::kStateCleared) != 0) sequence = {};
  for (ProtoReader each(defaults); each.next();) {
    if (each.field() != field::kTrackEventDefaults) continue;
    for (ProtoReader inner(each.bytes()); inner.next();) {
      if (inner.field() == field::kTrack) sequence.track = inner.number();
    }
  }
  if (!read_interned(sequence, interned)) return false;
  if (!description.empty() && !read_description(description)) return false;
  if (!has_event) return true;
  event_.emplace();
  event_->time_ns = static_cast<std::int64_t>(time);
  event_->track = sequence.track;
  if (time < kLatest && read_event(sequence, event)) return true;
  event_.reset();
  return false;
}

bool TraceReader::read_interned(Sequence& sequence, std::string_view interned) const {
  ProtoReader kinds(interned);
  while (kinds.next()) {
    const bool event = kinds.field() == field::kEventNames;
    if (!event && kinds.field() != field::kAnnotationNames) continue;
    std::uint64_t id = 0;
    std::string_view text;
    for (ProtoReader entry(kinds.bytes()); entry.next();) {
      if (entry.field() == field::kIid) id = entry.number();
      if (entry.field() == field::kInternedName) text = entry.bytes();
    }
    (event ? sequence.names : sequence.annotations)[id] = std::string(text);
  }
  return !kinds.broken();
}

bool TraceReader::read_event(const Sequence& sequence, std::string_view text) {
  ProtoReader fields(text);
  std::uint64_t type = 0;
  while (fields.next()) {
    switch (fields.field()) {
      case field::kType: type = fields.number(); break;
      case field::kTrack: event_->track = fields.number(); break;
      case field::kName: event_->name = fields.bytes(); break;
      case field::kFlow: event_->flow = fields.number(); break;
      case field::kNameId:
        if (const auto found = sequence.names.find(fields.number()); found != sequence.names.end())
          event_->name = found->second;
        break;
      case field::kAnnotation:
        if (!read_annotation(sequence, fields.bytes())) return false;
        break;
      default: break;
    }
  }
  if (fields.broken() || type < field::kBegin || type > field::kCounterType) return false;
  event_->type = static_cast<TraceEvent::Type>(type - field::kBegin);
  return true;
}

bool TraceReader::read_annotation(const Sequence& sequence, std::string_view text) {
  ProtoReader fields(text);
  std::string_view title;
  std::uint64_t value = 0;
  while (fields.next()) {
    if (fields.field() == field::kAnnotationName) title = fields.bytes();
    if (fields.field() == field::kAnnotationNameId) {
      const auto found = sequence.annotations.find(fields.number());
      if (found != sequence.annotations.end()) title = found->second;
    }
    if (fields.field() == field::kUnsigned || fields.field() == field::kSigned) value = fields.number();
  }
  const auto is_signed = static_cast<std::int64_t>(value);
  if (title == name::kBytes) event_->bytes = value;
  if (title == name::kWaited) event_->waited_ns = value;
  if (title == name::kWireBytes) event_->wire_bytes = value;
  if (title == name::kWireTime) event_->wire_us = value;
  if (title == name::kNumber) event_->number = value;
  if (title == name::kLost) event_->lost = value;
  if (title == name::kFailed) event_->failed = value != 0;
  if (title == name::kHostTime) event_->host_ns = is_signed;
  if (title == name::kRealtime) event_->realtime_ns = is_signed;
  if (title == name::kOffset) event_->offset_ns = is_signed;
  if (title == name::kUncertainty) event_->uncertainty_ns = is_signed;
  return !fields.broken();
}

bool TraceReader::read_description(std::string_view text) {
  description_.emplace();
  ProtoReader fields(text);
  while (fields.next()) {
    if (fields.field() == field::kUuid) description_->uuid = fields.number();
    if (fields.field() == field::kTrackName) description_->name = fields.bytes();
    if (fields.field() != field::kProcess) continue;
    for (ProtoReader process(fields.bytes()); process.next();) {
      if (process.field() == field::kProcessName) description_->process = process.bytes();
    }
  }
  return !fields.broken();
}

namespace {

/// A measurement this many times worse than the best would make the drift less accurate, and is left out.
constexpr std::int64_t kWorse = 4;
constexpr std::int64_t kNegligible = 20'000;
/// Longer than any clock runs, or differs from another, and small enough that sums of a few do not overflow.
constexpr std::int64_t kFarthest = std::int64_t{1} << 61;
/// Limit for times of day.
constexpr std::int64_t kLatestDay = std::int64_t{1} << 62;

bool sane(std::int64_t ns) { return ns > -kFarthest && ns < kFarthest; }
bool sane_day(std::int64_t ns) { return ns >= 0 && ns < kLatestDay; }

}  // namespace

void HostClock::take(const TraceEvent& event) {
  if (!event.host_ns || !sane(*event.host_ns) || *event.host_ns < 0) return;
  if (event.realtime_ns && sane_day(*event.realtime_ns)) {
    if (!base_ns_ && *event.host_ns >= event.time_ns) base_ns_ = *event.host_ns - event.time_ns;
    realtime_.push_back({*event.host_ns, *event.realtime_ns});
  }
  if (event.offset_ns && sane(*event.offset_ns) && event.uncertainty_ns >= 0 &&
      event.uncertainty_ns < kFarthest / kWorse)
    offsets_.push_back({*event.host_ns, *event.offset_ns, event.uncertainty_ns});
}

void HostClock::settle() {
  const auto by_time = [](const auto& a, const auto& b) { return a.host_ns < b.host_ns; };
  std::stable_sort(realtime_.begin(), realtime_.end(), by_time);
  std::stable_sort(offsets_.begin(), offsets_.end(), by_time);
  if (offsets_.empty()) return;
  std::int64_t best = offsets_.front().uncertainty_ns;
  for (const Offset& one : offsets_) best = std::min(best, one.uncertainty_ns);
  const std::int64_t most = std::max(best * kWorse, kNegligible);
  std::erase_if(offsets_, [most](const Offset& one) { return one.uncertainty_ns > most; });
}

std::int64_t HostClock::common_ns(std::int64_t host_ns) const noexcept {
  if (offsets_.empty()) return host_ns;
  const auto after =
      std::find_if(offsets_.begin(), offsets_.end(), [host_ns](const Offset& one) { return one.host_ns >= host_ns; });
  if (after == offsets_.end()) return host_ns - offsets_.back().offset_ns;
  if (after == offsets_.begin() || after->host_ns == host_ns) return host_ns - after->offset_ns;
  const Offset& before = *std::prev(after);
  const double share =
      static_cast<double>(host_ns - before.host_ns) / static_cast<double>(after->host_ns - before.host_ns);
  const double drifted = static_cast<double>(after->offset_ns - before.offset_ns) * share;
  return host_ns - (before.offset_ns + static_cast<std::int64_t>(drifted));
}

const HostClock::Realtime& HostClock::nearest(std::int64_t Realtime::*clock, std::int64_t ns) const noexcept {
  return *std::min_element(realtime_.begin(), realtime_.end(), [clock, ns](const Realtime& a, const Realtime& b) {
    return std::llabs(a.*clock - ns) < std::llabs(b.*clock - ns);
  });
}

std::optional<std::int64_t> HostClock::host_ns_of(std::int64_t realtime_ns) const noexcept {
  if (realtime_.empty() || !sane_day(realtime_ns)) return std::nullopt;
  const Realtime& one = nearest(&Realtime::realtime_ns, realtime_ns);
  return one.host_ns + (realtime_ns - one.realtime_ns);
}

std::optional<std::int64_t> HostClock::realtime_of(std::int64_t host_ns) const noexcept {
  if (realtime_.empty() || !sane(host_ns)) return std::nullopt;
  const Realtime& one = nearest(&Realtime::host_ns, host_ns);
  return one.realtime_ns + (host_ns - one.host_ns);
}

std::int64_t HostClock::uncertainty_ns() const noexcept {
  std::int64_t most = 0;
  for (const Offset& one : offsets_) most = std::max(most, one.uncertainty_ns);
  return most;
}

namespace {

namespace fs = std::filesystem;
using status::TrackId;

constexpr std::string_view kClockOf = "clock of ";

HostPiece look_at(const fs::path& file) {
  HostPiece piece;
  piece.file = file;
  const sys::FileBytes bytes = read_trace(piece);
  TraceReader reader(bytes.text());
  bool known = false;
  while (reader.next()) {
    known = true;
    if (const auto& about = reader.description()) {
      if (about->uuid >= status::kHostTracks && about->name.starts_with(kClockOf) && piece.host.empty())
        piece.host = about->name.substr(kClockOf.size());
      if (!about->process.empty() && about->uuid < status::kExternalTracks)
        piece.processes[TrackId::of(about->uuid).rank] = about->process;
    }
    if (const auto& event = reader.event(); event && event->track >= status::kHostTracks) piece.clock.take(*event);
  }
  piece.clock.settle();
  piece.damaged = reader.damaged();
  piece.torn = reader.torn();
  if (!known || piece.host.empty()) {
    raise(ErrorCode::Corrupt,
          "{}: this is no trace of one host -- give the folder of a run that was started with "
          "`cohort run --trace`, or its trace/host-N.pftrace",
          file.string());
  }
  return piece;
}

}  // namespace

sys::FileBytes read_trace(const HostPiece& piece) { return value_or_throw(sys::read_file(piece.file.string())); }

std::int64_t HostPiece::common_ns(std::int64_t time_ns, std::int64_t zero_ns) const noexcept {
  // Without clock measurements, the host's trace begins at the common beginning, and remarks_on reports that.
  if (!clock.measured() || !clock.has_base()) return time_ns;
  return std::max<std::int64_t>(clock.common_ns(clock.base_ns() + time_ns) - zero_ns, 0);
}

const HostPiece* TraceSet::of_rank(std::uint32_t rank) const {
  for (const HostPiece& piece : pieces) {
    if (piece.processes.contains(rank)) return &piece;
  }
  return nullptr;
}

TraceSet open_traces(const fs::path& run) {
  TraceSet set;
  std::error_code error;
  if (fs::is_directory(run, error)) {
    const fs::path folder = run / "trace";
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("host-") && name.ends_with(".pftrace")) set.pieces.push_back(look_at(entry.path()));
    }
    if (set.pieces.empty()) {
      raise(ErrorCode::Unavailable, "{}: there is no trace in trace/ -- was the run started with `cohort run --trace`?",
            run.string());
    }
  } else if (fs::exists(run, error)) {
    set.pieces.push_back(look_at(run));
  } else {
    raise(ErrorCode::Unavailable, "{}: there is no such run -- give its folder", run.string());
  }
  std::sort(set.pieces.begin(), set.pieces.end(), [](const HostPiece& a, const HostPiece& b) {
    return std::pair(a.file.string().size(), a.file.string()) < std::pair(b.file.string().size(), b.file.string());
  });
  std::int64_t zero = std::numeric_limits<std::int64_t>::max();
  for (const HostPiece& piece : set.pieces) {
    if (piece.clock.measured() && piece.clock.has_base())
      zero = std::min(zero, piece.clock.common_ns(piece.clock.base_ns()));
  }
  set.zero_ns = zero == std::numeric_limits<std::int64_t>::max() ? 0 : zero;
  return set;
}

std::vector<std::string> remarks_on(const TraceSet& set) {
  std::vector<std::string> remarks;
  for (const HostPiece& piece : set.pieces) {
    const auto say = [&](const std::string& what) { remarks.push_back(fmt::format("{}: {}", piece.host, what)); };
    if (!piece.clock.measured() || !piece.clock.has_base())
      say("its clock was not measured; its ranks are placed at the beginning");
    if (piece.torn) say("the trace ends in the middle of an event");
    if (piece.damaged > 0) say(fmt::format("{} events make no sense and are left out", piece.damaged));
  }
  return remarks;
}

void each_slice(const TraceSet& set, const HostPiece& piece, const std::function<void(const Slice&)>& take) {
  const sys::FileBytes bytes = read_trace(piece);
  TraceReader reader(bytes.text());
  std::map<std::uint64_t, std::vector<Slice>> open;
  // Inner slices of a thread end first, and so come first in the trace; each end follows its beginning.
  while (reader.next()) {
    const auto& event = reader.event();
    if (!event || event->track >= status::kExternalTracks) continue;
    const std::int64_t time = piece.common_ns(event->time_ns, set.zero_ns);
    Slice slice{status::TrackId::of(event->track), *event, std::string(event->name), time, time};
    slice.event.name = {};
    if (event->type == TraceEvent::Type::Begin) {
      open[event->track].push_back(std::move(slice));
    } else if (event->type == TraceEvent::Type::Instant) {
      take(slice);
    } else if (event->type == TraceEvent::Type::End) {
      auto& begun = open[event->track];
      if (begun.empty()) continue;
      slice = std::move(begun.back());
      begun.pop_back();
      slice.ended_ns = std::max(time, slice.begun_ns);
      take(slice);
    }
  }
}

}  // namespace cohort::track
