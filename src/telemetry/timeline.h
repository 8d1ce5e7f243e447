// Events in a rank, for its agent: operations, steps, buckets, checkpoints, waits and the program's own spans, in a
// ring of fixed slots. The agent makes the ring (a memory file that both map), drains it all the time (TimelineReader),
// and still has it when the rank was killed. Writers never wait: when the agent lags, the oldest events are
// overwritten, and the reader counts them. Without a ring, that is without `cohort run --trace`, an event costs one
// load. Any thread may write.
// TimelineReader is the agent's end of a timeline: it takes out the events that the rank has written since the last
// time, in order. The ring is another process's to write, so nothing in it is trusted: numbers are checked, and texts
// are bounded. One thread.
#pragma once

#include "base/memory.h"
#include "base/result.h"

#include <cohort/observer.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace cohort::status {

enum class TimelineKind : std::uint8_t { Operation = 1, Step, Bucket, Checkpoint, Wait, Span, Named };
inline constexpr std::uint8_t kLastTimelineKind = static_cast<std::uint8_t>(TimelineKind::Named);

/// One event, in words so that a reader may look while a thread writes.
struct alignas(64) TimelineSlot {
  static constexpr std::uint64_t kFailed = 1;
  static constexpr std::uint64_t kZeroCopy = 2;

  std::atomic<std::uint64_t> stamp;    ///< of the event's number the low 32 bits, stored last; above: wire time in us
  std::atomic<std::int64_t> begun_ns;  ///< CLOCK_MONOTONIC
  std::atomic<std::int64_t> ended_ns;
  std::atomic<std::uint64_t> what;    ///< kind | flags << 8 | name << 16 | lane << 32
  std::atomic<std::uint64_t> number;  ///< sequence of an operation, number of a step or bucket
  std::atomic<std::uint64_t> bytes;
  std::atomic<std::uint64_t> waited_ns;
  std::atomic<std::uint64_t> wire_bytes;
};

/// A name that events refer to by its place. Once `length` is not 0 it does not change.
struct TimelineName {
  static constexpr std::size_t kBytes = 60;
  std::atomic<std::uint32_t> state;  ///< 0: free; 1: being written; else 2 + length
  char text[kBytes];
};

/// The ring. Its numbers are those of one build, as the status page's.
struct TimelineLayout {
  static constexpr std::uint64_t kMagic = 0x3130454d49544843;  // "CHTIME01"
  static constexpr std::size_t kSlots = std::size_t{1} << 14;
  static constexpr std::size_t kNames = 2048;  ///< 0 stands for all names that did not fit

  std::uint64_t magic;
  std::atomic<std::int32_t> pid;                ///< of the process that writes; 0: none has come yet
  alignas(64) std::atomic<std::uint64_t> head;  ///< events so far, also those that are being written
  alignas(64) TimelineName names[kNames];
  TimelineSlot slots[kSlots];
};

/// For the agent: an empty ring. Unavailable if there is no memory.
Result<sys::SharedSegment> create_timeline();

namespace timeline {

using Clock = std::chrono::steady_clock;

struct Event {
  TimelineKind kind = TimelineKind::Span;
  std::string_view name;  ///< the first 60 bytes count
  Clock::time_point begun, ended;
  std::uint32_t lane = 0;  ///< of an operation: its group; of spans and waits: the thread
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  Clock::duration waited = {};  ///< for other ranks
};

namespace detail {
enum : int { kUnknown, kOff, kOn };
extern std::atomic<int> state;
bool look() noexcept;
}  // namespace detail

/// Returns whether events are recorded.
inline bool on() noexcept {
  const int state = detail::state.load(std::memory_order_relaxed);
  return state != detail::kOff && (state == detail::kOn || detail::look());
}

// These do nothing if there is no ring.
void add(const Event& event) noexcept;
void add(const CollectiveEvent& event) noexcept;
/// This thread's number, the lane of its spans.
std::uint32_t this_thread() noexcept;
/// The program has done a step: it began when the one before ended.
void add_step(std::int64_t step) noexcept;

/// From its beginning to its end, on this thread's lane.
class Scope {
 public:
  explicit Scope(TimelineKind kind, std::string_view name, std::uint64_t number = 0) noexcept {
    if (on()) event_ = {kind, name, Clock::now(), {}, this_thread(), number, 0, {}};
  }
  ~Scope() {
    if (event_.begun == Clock::time_point{}) return;
    event_.ended = Clock::now();
    add(event_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Event event_;  ///< `name` has to live as long
};

}  // namespace timeline

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
  /// `ring`: made by `create_timeline`; must outlive the reader.
  explicit TimelineReader(const TimelineLayout& ring) noexcept : ring_(ring) {}

  enum class Until { Now, End };
  /// At most as many events as the ring has slots. One that is still being written is waited for until the next call,
  /// once; at the end of the rank for nothing.
  void drain(Until until, const std::function<void(const TimelineEntry&)>& take);
  /// Bytes of any kind, at most TimelineName::kBytes; empty for a name that did not fit.
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
