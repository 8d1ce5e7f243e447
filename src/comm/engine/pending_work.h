// The Work of an operation that is not over when it is submitted, in either kind of Carrier: the queue of collectives,
// or a matcher of sends and receives. All members except `done` are protected by the carrier's mutex; the outcome does
// not change after the work is done. Any thread may call.
#pragma once

#include "base/thread.h"
#include "comm/api/work_state.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::comm {

class PendingWork;

/// A queue or a matcher: carries out operations, and lets threads wait for them.
class Carrier {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Carrier() = default;
  /// Blocks until the work is done. Returns false if it is not done by `limit`. May carry out operations meanwhile.
  virtual bool wait_until(PendingWork& work, Clock::time_point limit) = 0;
  virtual void add_callback(PendingWork& work, std::function<void()> callback) = 0;
  virtual bool in_child() const noexcept = 0;
};

class PendingWork : public UnfinishedWork {
 public:
  using Clock = Carrier::Clock;

  void wait() final { carrier_.wait_until(*this, Clock::time_point::max()); }
  bool wait_for(std::chrono::nanoseconds limit) final {
    constexpr auto kLongest = std::chrono::hours(24 * 365);
    return done() || carrier_.wait_until(*this, Clock::now() + std::min<std::chrono::nanoseconds>(limit, kLongest));
  }
  void on_done(std::function<void()> callback) final { carrier_.add_callback(*this, std::move(callback)); }
  bool at_home() const noexcept final { return !carrier_.in_child(); }

 protected:
  /// `keep` keeps the carrier alive.
  PendingWork(Carrier& carrier, std::shared_ptr<void> keep) noexcept : carrier_(carrier), keep_(std::move(keep)) {}

 private:
  Carrier& carrier_;
  const std::shared_ptr<void> keep_;
};

}  // namespace cohort::comm

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

namespace cohort::comm {

// Detects that the process is a forked child of the one that made the object, by means of a page that the kernel clears
// in children. A query costs one load. Any thread.
class ForkGuard {
 public:
  ForkGuard() noexcept {
    void* const page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    ::madvise(page, kPage, MADV_WIPEONFORK);
    word_ = static_cast<std::uint32_t*>(page);
    *word_ = kHome;
  }
  ~ForkGuard() {
    if (word_ != nullptr) ::munmap(word_, kPage);
  }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool in_child() const noexcept { return word_ != nullptr && *word_ != kHome; }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::uint32_t kHome = 1;
  std::uint32_t* word_ = nullptr;
};

// Deadline until which the running operation may wait for other ranks, and makes the error about ranks that do not
// come. Belongs to the thread that runs operations; `limit` may be called from any thread.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Begins the timeout at `called`. If that is zero, `begin_now` begins it, since reading the clock takes as long as a
  /// small operation.
  void begin(Clock::time_point called, std::chrono::milliseconds timeout) noexcept {
    called_ = called;
    timeout_ = timeout;
  }
  void begin_now() noexcept {
    if (called_ == Clock::time_point{}) called_ = Clock::now();
  }
  /// Sets a time that no wait may exceed, since operations queued behind this one have deadlines too. Any thread.
  void limit(Clock::time_point limit) noexcept {
    limit_.store(limit.time_since_epoch().count(), std::memory_order_relaxed);
  }
  Clock::time_point when() const noexcept;
  /// Text for messages: "after 300 ms".
  std::string after() const;

 private:
  Clock::time_point limit() const noexcept {
    return Clock::time_point(Clock::duration(limit_.load(std::memory_order_relaxed)));
  }

  Clock::time_point called_{};
  std::chrono::milliseconds timeout_{0};
  std::atomic<Clock::rep> limit_{std::numeric_limits<Clock::rep>::max()};
};

/// An operation and the rank that waits in it, as they are named in messages.
struct RunningOperation {
  std::string text;  ///< "all_reduce(float32[10], sum)"
  std::uint64_t number = 0;
  int rank = 0;
  std::string_view host;
};

/// Lists `described` of the missing ranks, at most the first few.
std::string list_missing(const std::vector<int>& missing, const std::function<std::string(int)>& described);
std::string timeout_text(const RunningOperation& operation, const Deadline& deadline, const std::string& missing);
/// `pid`: "pid 12", or empty. `how`: the reason why the peer will not come.
std::string lost_text(const RunningOperation& operation, int peer, std::string_view host, std::string_view pid,
                      std::string_view how);

// Counts of the threads that wait for a communicator's operations, and the deadline. If no thread waits, a rank leaves
// the core to computing threads while it waits for peers. Any thread, except for the deadline.
struct Waiters {
  std::atomic<int> attended{0};        ///< threads that wait for results
  std::atomic<int> awaited{0};         ///< those of them that belong to the program
  std::atomic<bool> in_caller{false};  ///< a caller runs an operation itself, so it waits without being counted above
  Deadline deadline;                   ///< deadline of the running operation
};

/// Counts the thread that constructs it as waiting, until it is destroyed.
class WaiterCount {
 public:
  explicit WaiterCount(Waiters& waiters) : waiters_(waiters), of_program_(sys::in_service_thread() ? 0 : 1) {
    waiters_.attended.fetch_add(1, std::memory_order_relaxed);
    waiters_.awaited.fetch_add(of_program_, std::memory_order_relaxed);
  }
  ~WaiterCount() {
    waiters_.attended.fetch_sub(1, std::memory_order_relaxed);
    waiters_.awaited.fetch_sub(of_program_, std::memory_order_relaxed);
  }
  WaiterCount(const WaiterCount&) = delete;
  WaiterCount& operator=(const WaiterCount&) = delete;

 private:
  Waiters& waiters_;
  const int of_program_;
};

}  // namespace cohort::comm
