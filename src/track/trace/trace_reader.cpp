#include "track/trace/trace_reader.h"

#include "status/trace_encoder.h"

#include <cstring>

namespace cohort::track {
namespace {

namespace field = status::trace_field;
namespace name = status::trace_name;

/// Later than any clock says, and sums of some such fit.
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

}  // namespace cohort::track
