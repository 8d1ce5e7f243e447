#include "status/timeline_reader.h"

#include <algorithm>

namespace cohort::status {
namespace {

enum class Found { Whole, Unwritten, Overwritten, Nonsense };

Found read(const TimelineLayout& ring, std::uint64_t number, TimelineEntry& entry) {
  constexpr auto kAcquire = std::memory_order_acquire;
  const TimelineSlot& slot = ring.slots[number % TimelineLayout::kSlots];
  const std::uint64_t stamp = slot.stamp.load(kAcquire);
  const bool whole = static_cast<std::uint32_t>(stamp) == static_cast<std::uint32_t>(number + 1);
  entry.begun_ns = slot.begun_ns.load(kAcquire);
  entry.ended_ns = slot.ended_ns.load(kAcquire);
  const std::uint64_t what = slot.what.load(kAcquire);
  entry.number = slot.number.load(kAcquire);
  entry.bytes = slot.bytes.load(kAcquire);
  entry.waited_ns = slot.waited_ns.load(kAcquire);
  entry.wire_bytes = slot.wire_bytes.load(kAcquire);
  // Whoever has taken the slot again had counted first.
  if (ring.head.load(kAcquire) > number + TimelineLayout::kSlots) return Found::Overwritten;
  if (!whole) return Found::Unwritten;
  const auto kind = static_cast<std::uint8_t>(what);
  entry.kind = static_cast<TimelineKind>(kind);
  entry.failed = (what >> 8 & TimelineSlot::kFailed) != 0;
  entry.zero_copy = (what >> 8 & TimelineSlot::kZeroCopy) != 0;
  entry.name = static_cast<std::uint16_t>(what >> 16);
  entry.lane = static_cast<std::uint32_t>(what >> 32);
  entry.wire_us = stamp >> 32;
  const bool sane = kind >= 1 && kind <= kLastTimelineKind && entry.begun_ns >= 0 && entry.ended_ns >= entry.begun_ns;
  return sane ? Found::Whole : Found::Nonsense;
}

}  // namespace

void TimelineReader::drain(Until until, const std::function<void(const TimelineEntry&)>& take) {
  const std::uint64_t head = ring_.head.load(std::memory_order_acquire);
  if (head < next_) return;  // what no writer of ours does
  if (head - next_ > TimelineLayout::kSlots) {
    const std::uint64_t oldest = head - TimelineLayout::kSlots;
    lost_ += oldest - next_;
    next_ = oldest;
  }
  TimelineEntry entry;
  for (; next_ < head; ++next_) {
    switch (read(ring_, next_, entry)) {
      case Found::Whole: take(entry); break;
      case Found::Unwritten:
        if (until == Until::Now && waits_for_ != next_) {
          waits_for_ = next_;
          return;
        }
        [[fallthrough]];
      case Found::Overwritten:
      case Found::Nonsense: ++lost_; break;
    }
  }
}

std::string_view TimelineReader::name(std::uint16_t place) const noexcept {
  if (place == 0 || place >= TimelineLayout::kNames) return {};
  const TimelineName& entry = ring_.names[place];
  const std::uint32_t state = entry.state.load(std::memory_order_acquire);
  if (state < 2) return {};
  return {entry.text, std::min<std::size_t>(state - 2, TimelineName::kBytes)};
}

}  // namespace cohort::status
