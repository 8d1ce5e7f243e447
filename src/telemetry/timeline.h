// Events in a rank, for its agent: operations, steps, buckets, checkpoints, waits and the program's own spans, in a
// ring of fixed slots. The agent makes the ring (a memory file that both map), drains it continuously (TimelineReader),
// and keeps it if the rank is killed. Writers never wait. If the agent lags, the oldest events are overwritten, and the
// reader counts them. Without a ring (without `cohort run --trace`) an event costs one load. Any thread may write.
// TimelineReader, for the agent, takes the events written since the last time out of a timeline, in order. Another
// process writes the ring, so nothing in it is trusted. Numbers are checked, and texts are bounded. One thread.
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

/// One event, in atomic words, so that it can be read while a thread writes.
struct alignas(64) TimelineSlot {
  static constexpr std::uint64_t kFailed = 1;
  static constexpr std::uint64_t kZeroCopy = 2;

  std::atomic<std::uint64_t> stamp;    ///< low half: of the event's number, stored last; high half: wire time in us
  std::atomic<std::int64_t> begun_ns;  ///< CLOCK_MONOTONIC
  std::atomic<std::int64_t> ended_ns;
  std::atomic<std::uint64_t> what;    ///< kind | flags << 8 | name << 16 | lane << 32
  std::atomic<std::uint64_t> number;  ///< sequence of an operation; number of a step or bucket
  std::atomic<std::uint64_t> bytes;
  std::atomic<std::uint64_t> waited_ns;
  std::atomic<std::uint64_t> wire_bytes;
};

/// A name, to which events refer by its index. It does not change after it has been written.
struct TimelineName {
  static constexpr std::size_t kBytes = 60;
  std::atomic<std::uint32_t> state;  ///< 0: free; 1: being written; else 2 + length
  char text[kBytes];
};

/// The ring. Its layout belongs to one build, as for the status page.
struct TimelineLayout {
  static constexpr std::uint64_t kMagic = 0x3130454d49544843;  // "CHTIME01"
  static constexpr std::size_t kSlots = std::size_t{1} << 14;
  static constexpr std::size_t kNames = 2048;  ///< index 0 stands for all names that did not fit

  std::uint64_t magic;
  std::atomic<std::int32_t> pid;                ///< pid of the process that writes; 0: no process yet
  alignas(64) std::atomic<std::uint64_t> head;  ///< number of events so far, including those being written
  alignas(64) TimelineName names[kNames];
  TimelineSlot slots[kSlots];
};

/// For the agent: makes an empty ring. Fails with Unavailable if there is no memory.
Result<sys::SharedSegment> create_timeline();

namespace timeline {

using Clock = std::chrono::steady_clock;

struct Event {
  TimelineKind kind = TimelineKind::Span;
  std::string_view name;  ///< cut to 60 bytes
  Clock::time_point begun, ended;
  std::uint32_t lane = 0;  ///< an operation's group; the thread of a span or wait
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  Clock::duration waited = {};  ///< time spent waiting for other ranks
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

// The following functions do nothing without a ring.
void add(const Event& event) noexcept;
void add(const CollectiveEvent& event) noexcept;
/// Returns this thread's number, which is the lane of its spans.
std::uint32_t this_thread() noexcept;
/// Records that the program has done a step, which began when the previous one ended.
void add_step(std::int64_t step) noexcept;

/// An event from construction to destruction, on this thread's lane.
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
  Event event_;  ///< `name` must outlive the Scope
};

}  // namespace timeline

struct TimelineEntry {
  TimelineKind kind = TimelineKind::Span;
  bool failed = false;
  bool zero_copy = false;
  std::uint16_t name = 0;  ///< index for `TimelineReader::name`
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
  /// Takes at most as many events as the ring has slots. Stops at an event that is still being written; the next call
  /// skips the event if it is still unfinished. With Until::End, skips unfinished events.
  void drain(Until until, const std::function<void(const TimelineEntry&)>& take);
  /// Returns a name: arbitrary bytes, at most TimelineName::kBytes; empty for a name that did not fit.
  std::string_view name(std::uint16_t place) const noexcept;
  /// Number of events that were overwritten before they could be taken, or were never finished.
  std::uint64_t lost() const noexcept { return lost_; }

 private:
  const TimelineLayout& ring_;
  std::uint64_t next_ = 0;
  std::uint64_t waits_for_ = ~std::uint64_t{0};  ///< number of the event that was unfinished in the last call
  std::uint64_t lost_ = 0;
};

}  // namespace cohort::status
