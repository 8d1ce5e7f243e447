// The agent's end of a timeline: takes out what its rank has written since the last time, in order. The ring is another
// process's to write, so nothing in it is believed: numbers are checked, and texts are bounded. One thread.
#pragma once

#include "status/timeline.h"

#include <cstdint>
#include <functional>
#include <string_view>

namespace cohort::status {

struct TimelineEntry {
  TimelineKind kind = TimelineKind::Span;
  bool failed = false;
  bool zero_copy = false;
  std::uint16_t name = 0;  ///< of `TimelineReader::name`
  std::uint32_t lane = 0;
  std::int64_t begun_ns = 0;
  std::int64_t ended_ns = 0;
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  std::uint64_t waited_ns = 0;
  std::uint64_t wire_us = 0;
  std::uint64_t wire_bytes = 0;
};

class TimelineReader {
 public:
  /// Of `create_timeline`; lives as long as this.
  explicit TimelineReader(const TimelineLayout& ring) noexcept : ring_(ring) {}

  enum class Until { Now, End };
  /// At most as many events as the ring has slots. One that is still being written is waited for until the next call,
  /// once; at the end of the rank for nothing.
  void drain(Until until, const std::function<void(const TimelineEntry&)>& take);
  /// Bytes of any kind, at most TimelineName::kBytes; empty for one that found no room.
  std::string_view name(std::uint16_t place) const noexcept;
  /// Events that were overwritten before they could be taken, or never became whole.
  std::uint64_t lost() const noexcept { return lost_; }

 private:
  const TimelineLayout& ring_;
  std::uint64_t next_ = 0;
  std::uint64_t waits_for_ = ~std::uint64_t{0};  ///< the one that was not whole the last time
  std::uint64_t lost_ = 0;
};

}  // namespace cohort::status
