// The state behind a Work. Each backend derives a class that says how its operations are waited for.
// Any thread may call; only one thread at a time waits.
#pragma once

#include "comm/kernels/arrays.h"

#include <cohort/buffer.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cohort::comm {

/// Outcome of making a GPU stream wait for an operation.
enum class Ordering {
  Done,
  NotYet,  ///< the operation has not been submitted to a GPU so far
  Never,   ///< a stream cannot wait for the operation, or the result is there already
};

class WorkState {
 public:
  virtual ~WorkState() = default;

  /// Blocks until the operation has finished; its deadline ensures that it does.
  virtual void wait() = 0;
  /// Blocks until the operation has finished, for at most `limit`. Returns true if it has finished.
  virtual bool wait_for(std::chrono::nanoseconds limit) = 0;
  /// Makes all later work on this GPU stream wait for the result. Blocks until the operation itself has
  /// been submitted to the GPU, but not beyond `limit`; may carry out operations meanwhile. Throws Internal.
  virtual Ordering order(const Device& /*stream*/, std::chrono::steady_clock::time_point /*limit*/) {
    return Ordering::Never;
  }
  /// True if all buffers of the operation belong to this stream.
  virtual bool is_given_in(const Device& /*stream*/) const noexcept { return false; }
  virtual bool done() const noexcept = 0;
  /// Outcome of a finished operation: an error, or nothing. The outcome does not change any more.
  virtual const std::optional<Error>& outcome() const noexcept = 0;
  virtual void on_done(std::function<void()> callback) = 0;
  /// Sender of the message that a finished receive from any source has received.
  virtual std::optional<int> source() const noexcept { return std::nullopt; }
  /// False in a forked child of the process that started the operation: then no other member may be used.
  virtual bool at_home() const noexcept { return true; }

  /// True once the error has been reported to the program.
  std::atomic<bool> reported{false};
};

/// Work that ends later, and the callbacks that are called then. Protected by the mutex of its queue or matcher, except
/// `done` and, after the end, `outcome`.
class UnfinishedWork : public WorkState {
 public:
  bool done() const noexcept final { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept final { return outcome_; }

  void set_outcome(std::optional<Error> outcome) noexcept { outcome_ = std::move(outcome); }
  /// Called after `set_outcome`.
  void set_done() noexcept { done_.store(true, std::memory_order_release); }
  bool has_callbacks() const noexcept { return !callbacks_.empty(); }
  std::vector<std::function<void()>> take_callbacks() noexcept { return std::exchange(callbacks_, {}); }
  /// Adds the callback under the mutex and returns true. If the work is done, calls `callback` and returns false.
  template <class Mutex>
  bool add_callback(Mutex& mutex, std::function<void()> callback) {
    {
      const std::lock_guard lock(mutex);
      if (!done()) {
        callbacks_.push_back(std::move(callback));
        return true;
      }
    }
    callback();
    return false;
  }

 private:
  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;  // written before done_
  std::vector<std::function<void()>> callbacks_;
};

/// The state of an operation that failed before it was started, or while its caller ran it.
class FailedWork final : public WorkState {
 public:
  explicit FailedWork(Error error) : outcome_(std::move(error)) {}
  void wait() override {}
  bool wait_for(std::chrono::nanoseconds) override { return true; }
  bool done() const noexcept override { return true; }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override { callback(); }

 private:
  const std::optional<Error> outcome_;
};

// Answers whether the result of an operation is finite. Shared by the request and the Work. A backend that sees all
// results while it computes them notes the answer in the request. One thread notes, before the operation is done; any
// thread may call `finite` after that.
class FiniteCheck {
 public:
  explicit FiniteCheck(ConstBuffer result) noexcept : result_(result) {}

  /// Names a copy of the result, to be read instead. `keep` keeps the copy alive until `let_go`. Called before the
  /// operation is done.
  void read_instead(ConstBuffer result, std::shared_ptr<void> keep) noexcept {
    result_ = result;
    keep_ = std::move(keep);
  }
  /// Checks the copy, unless the operation has failed or the answer is known, and releases the copy. Called before the
  /// operation is done.
  void let_go(bool failed) {
    if (!keep_) return;
    if (!failed && seen_.load(std::memory_order_relaxed) == Seen::Nothing) note(finite());
    keep_.reset();
  }
  /// Called by a backend, with the answer for the results of all ranks together. If no backend calls `note`, `finite`
  /// reads the result once more.
  void note(bool finite) noexcept { seen_.store(finite ? Seen::Finite : Seen::NonFinite, std::memory_order_relaxed); }
  /// Called after the operation has finished, while its result is unchanged.
  bool finite() const {
    const Seen seen = seen_.load(std::memory_order_relaxed);
    if (seen == Seen::Nothing) return !has_non_finite(result_.data, result_.count, result_.dtype);
    return seen == Seen::Finite;
  }

 private:
  enum class Seen : unsigned char { Nothing, Finite, NonFinite };
  ConstBuffer result_;
  std::shared_ptr<void> keep_;
  std::atomic<Seen> seen_{Seen::Nothing};
};

}  // namespace cohort::comm

namespace cohort::comm::times {

// Times of this process's collectives, read by the rank's agent: the status page has the sums (COHORT_TIMES), the
// timeline has each collective (`cohort run --trace`). The time that the program waits for collectives is always added
// up, which costs two reads of the clock for each wait that does not end immediately. Any thread.

/// True if the environment or the agent asks for these times.
bool wanted() noexcept;

/// Adds an operation that has ended.
void add(const CollectiveEvent& event) noexcept;
/// Excludes this thread's waits from those of the program, since the thread belongs to Cohort.
void leave_out_this_thread() noexcept;

/// Adds time that the program has waited outside of an Exposed.
void add_exposed(std::uint64_t ns) noexcept;

/// Counts its lifetime as time in which the program only waits. An Exposed within another Exposed adds nothing.
class Exposed {
 public:
  Exposed() noexcept { begin(); }
  ~Exposed() {
    if (begun_ != Clock::time_point{}) end();
  }
  Exposed(const Exposed&) = delete;
  Exposed& operator=(const Exposed&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  void begin() noexcept;
  void end() noexcept;
  Clock::time_point begun_{};
};

}  // namespace cohort::comm::times
