// Reads packets of Perfetto's format back, as far as Cohort writes them, one after the other. Any bytes may come: a
// torn end is where the trace ends, what is no packet is counted, and fields that are not known are left alone. The
// text has to live as long as the reader. One thread.
#pragma once

#include "base/result.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace cohort::track {

/// Goes through the fields of a message.
class ProtoReader {
 public:
  explicit ProtoReader(std::string_view message) noexcept : rest_(message) {}

  /// False at the end, and where the rest makes no sense: then `broken`.
  bool next();
  bool broken() const noexcept { return broken_; }
  std::uint32_t field() const noexcept { return field_; }
  /// Of a number; of a fixed64 its bits.
  std::uint64_t number() const noexcept { return number_; }
  /// Of a text or a message.
  std::string_view bytes() const noexcept { return bytes_; }
  /// The field as it stands there, with its tag.
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
  std::string_view name;  ///< until the reader's next call
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

  /// The next packet; false at the end.
  bool next();
  /// Its fields.
  std::string_view packet() const noexcept { return packet_; }
  const std::optional<TraceEvent>& event() const noexcept { return event_; }
  const std::optional<TraceDescription>& description() const noexcept { return description_; }

  /// Packets that made no sense and were passed over.
  std::uint64_t damaged() const noexcept { return damaged_; }
  /// The trace ends in the middle of a packet.
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

}  // namespace cohort::track
