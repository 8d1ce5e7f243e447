#include "telemetry/timeline.h"

#include "base/env.h"
#include "base/parse.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace cohort::status {
namespace {

TimelineLayout* own_ring = nullptr;  // set before `state` becomes kOn; never unmapped
std::atomic<std::int64_t> last_step_ns{0};

std::int64_t ns_of(timeline::Clock::time_point time) noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::uint64_t count_of(std::chrono::nanoseconds duration) noexcept {
  return duration.count() > 0 ? static_cast<std::uint64_t>(duration.count()) : 0;
}

// Returns the index of a name. Names are few and short, so they are hashed and compared each time, without a shared
// cache.
std::uint64_t intern(std::string_view name) noexcept {
  if (name.size() > TimelineName::kBytes) name = name.substr(0, TimelineName::kBytes);
  const std::uint64_t hash = fnv1a(name);
  constexpr std::size_t kMostTries = 32;
  for (std::size_t tried = 0; tried < kMostTries; ++tried) {
    const std::size_t place = 1 + (hash + tried) % (TimelineLayout::kNames - 1);
    TimelineName& entry = own_ring->names[place];
    std::uint32_t state = entry.state.load(std::memory_order_acquire);
    if (state == 0 && entry.state.compare_exchange_strong(state, 1, std::memory_order_acquire)) {
      std::memcpy(entry.text, name.data(), name.size());
      entry.state.store(2 + static_cast<std::uint32_t>(name.size()), std::memory_order_release);
      return place;
    }
    // If another thread is writing the entry, the name may get a second entry, which is better than waiting.
    if (state == 2 + name.size() && std::memcmp(entry.text, name.data(), name.size()) == 0) return place;
  }
  return 0;
}

struct Words {
  std::uint64_t wire_us = 0;
  std::int64_t begun_ns = 0, ended_ns = 0;
  std::uint64_t what = 0, number = 0, bytes = 0, waited_ns = 0, wire_bytes = 0;
};

std::uint64_t pack(TimelineKind kind, std::uint64_t flags, std::uint64_t name, std::uint32_t lane) noexcept {
  return static_cast<std::uint64_t>(kind) | flags << 8 | name << 16 | static_cast<std::uint64_t>(lane) << 32;
}

// Stores each word with release order, so that a reader that sees a later event's word then also sees, in `head`, that
// the slot was reused.
void write(const Words& words) noexcept {
  constexpr auto kRelease = std::memory_order_release;
  const std::uint64_t number = own_ring->head.fetch_add(1, std::memory_order_acq_rel);
  TimelineSlot& slot = own_ring->slots[number % TimelineLayout::kSlots];
  slot.begun_ns.store(words.begun_ns, kRelease);
  slot.ended_ns.store(words.ended_ns, kRelease);
  slot.what.store(words.what, kRelease);
  slot.number.store(words.number, kRelease);
  slot.bytes.store(words.bytes, kRelease);
  slot.waited_ns.store(words.waited_ns, kRelease);
  slot.wire_bytes.store(words.wire_bytes, kRelease);
  const auto stamp = static_cast<std::uint32_t>(number + 1);
  slot.stamp.store(stamp | std::min<std::uint64_t>(words.wire_us, 0xffffffff) << 32, kRelease);
}

// As with the status page, only the first process writes, not its forks and children.
TimelineLayout* take_ring() noexcept {
  const auto fd = env::number(env::kTimelineFd);
  if (!fd || *fd <= 2) return nullptr;
  auto mapped = sys::map_shared_segment(*fd, sizeof(TimelineLayout));
  if (!mapped) return nullptr;
  auto* const layout = static_cast<TimelineLayout*>(mapped->data());
  std::int32_t nobody = 0;
  if (layout->magic != TimelineLayout::kMagic ||
      !layout->pid.compare_exchange_strong(nobody, static_cast<std::int32_t>(::getpid()))) {
    return nullptr;
  }
  ::fcntl(*fd, F_SETFD, FD_CLOEXEC);
  ::pthread_atfork(nullptr, nullptr, [] { timeline::detail::state.store(timeline::detail::kOff); });
  static auto* const kept = new sys::Mapping();  // threads may write until the process is gone
  *kept = *std::move(mapped);
  return layout;
}

}  // namespace

Result<sys::SharedSegment> create_timeline() {
  auto segment = sys::create_shared_segment("cohort-timeline", sizeof(TimelineLayout));
  if (segment) {
    auto* const layout = static_cast<TimelineLayout*>(segment->mapping.data());
    layout->magic = TimelineLayout::kMagic;  // all other fields start as 0
  }
  return segment;
}

namespace timeline {

std::atomic<int> detail::state{detail::kUnknown};

bool detail::look() noexcept {
  static std::mutex looking;
  const std::lock_guard lock(looking);
  if (state.load(std::memory_order_relaxed) == kUnknown) {
    own_ring = take_ring();
    state.store(own_ring != nullptr ? kOn : kOff, std::memory_order_release);
  }
  return state.load(std::memory_order_relaxed) == kOn;
}

std::uint32_t this_thread() noexcept {
  thread_local const auto number = static_cast<std::uint32_t>(::syscall(SYS_gettid));
  return number;
}

namespace {
/// Like `on`, but afterwards this thread can use the ring. (Uses a load, since ThreadSanitizer does not know fences.)
bool taken() noexcept { return on() && detail::state.load(std::memory_order_acquire) == detail::kOn; }
}  // namespace

void add(const Event& event) noexcept {
  if (!taken()) return;
  write({.begun_ns = ns_of(event.begun),
         .ended_ns = ns_of(event.ended),
         .what = pack(event.kind, 0, intern(event.name), event.lane),
         .number = event.number,
         .bytes = event.bytes,
         .waited_ns = count_of(event.waited)});
}

void add(const CollectiveEvent& event) noexcept {
  if (!taken()) return;
  const std::uint64_t flags =
      (event.failed ? TimelineSlot::kFailed : 0) | (event.zero_copy ? TimelineSlot::kZeroCopy : 0);
  const auto lane = static_cast<std::uint32_t>(event.group ^ event.group >> 32);
  write({.wire_us = count_of(event.wire) / 1000,
         .begun_ns = ns_of(event.begun),
         .ended_ns = ns_of(event.ended),
         .what = pack(TimelineKind::Operation, flags, intern(event.operation), lane),
         .number = event.sequence,
         .bytes = event.bytes,
         .waited_ns = count_of(event.waited),
         .wire_bytes = event.wire_bytes});
}

void add_step(std::int64_t step) noexcept {
  if (!on()) return;
  const std::int64_t now = ns_of(Clock::now());
  const std::int64_t before = last_step_ns.exchange(now, std::memory_order_relaxed);
  // The beginning of the first step is not known, so that step gets no duration.
  const Clock::time_point ended{std::chrono::nanoseconds(now)};
  const Clock::time_point begun{std::chrono::nanoseconds(before != 0 ? before : now)};
  add(Event{TimelineKind::Step, "step", begun, ended, 0, static_cast<std::uint64_t>(step), 0, {}});
}

}  // namespace timeline

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
  // A writer increases `head` before it reuses a slot.
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
  if (head < next_) return;  // Cohort's writers never decrease `head`
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
