// The state behind a Work. A backend derives from it to say how its operations are waited for.
// Any thread may call; one at a time waits.
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

/// State of putting a stream after a result.
enum class Ordering {
  Done,
  NotYet,  ///< nobody has been given the operation so far
  Never,   ///< there is nothing to wait for but the result itself, or it is there
};

class WorkState {
 public:
  virtual ~WorkState() = default;

  /// Returns once the operation has finished, which its deadline makes sure of.
  virtual void wait() = 0;
  /// The same, but for at most `limit`; true if it has finished.
  virtual bool wait_for(std::chrono::nanoseconds limit) = 0;
  /// Puts what this stream of a GPU is given from now on after the result, as soon as the GPU has been given the
  /// operation, for which it waits until `limit`. May carry out operations meanwhile. Throws Internal.
  virtual Ordering order(const Device& /*stream*/, std::chrono::steady_clock::time_point /*limit*/) {
    return Ordering::Never;
  }
  /// True if this is the stream of all its buffers.
  virtual bool is_given_in(const Device& /*stream*/) const noexcept { return false; }
  virtual bool done() const noexcept = 0;
  /// Outcome of a finished operation. It does not change any more.
  virtual const std::optional<Error>& outcome() const noexcept = 0;
  virtual void on_done(std::function<void()> callback) = 0;
  /// Rank whose message a finished receive from any source took.
  virtual std::optional<int> source() const noexcept { return std::nullopt; }
  /// False in a forked child of the process that started it: then nothing of it may be touched.
  virtual bool at_home() const noexcept { return true; }

  /// Somebody has been given the error.
  std::atomic<bool> reported{false};
};

/// Work that ends later, and the callbacks it then calls. Protected by its carrier's mutex, but for `done` and, once
/// it is done, the outcome.
class UnfinishedWork : public WorkState {
 public:
  bool done() const noexcept final { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept final { return outcome_; }

  void set_outcome(std::optional<Error> outcome) noexcept { outcome_ = std::move(outcome); }
  /// Its outcome has been set.
  void set_done() noexcept { done_.store(true, std::memory_order_release); }
  bool has_callbacks() const noexcept { return !callbacks_.empty(); }
  std::vector<std::function<void()>> take_callbacks() noexcept { return std::exchange(callbacks_, {}); }
  /// Takes the mutex. Calls at once where it is done: false.
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

/// An operation that failed before it was started, or in the caller.
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

// Answers whether the result of an operation is finite. Shared by the request, on which a backend that has seen all
// results while they were made notes the answer, and by the Work. One thread notes, before the operation is done; any
// thread may ask after that.
class FiniteCheck {
 public:
  explicit FiniteCheck(ConstBuffer result) noexcept : result_(result) {}

  /// The result is here, too, as long as `keep` lives: until `let_go`. Before the operation is done.
  void read_instead(ConstBuffer result, std::shared_ptr<void> keep) noexcept {
    result_ = result;
    keep_ = std::move(keep);
  }
  /// Before the operation is done: reads what is to be read there, unless it has failed.
  void let_go(bool failed) {
    if (!keep_) return;
    if (!failed && seen_.load(std::memory_order_relaxed) == Seen::Nothing) note(finite());
    keep_.reset();
  }
  /// Called by the backend, on the results of all ranks together. If no backend does, the result is read once more.
  void note(bool finite) noexcept { seen_.store(finite ? Seen::Finite : Seen::NonFinite, std::memory_order_relaxed); }
  /// For a finished operation, whose result is still as it was.
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

// Times of this process's collectives, for readers: added up in the rank's status page (COHORT_TIMES), and one by one
// in its timeline (`cohort run --trace`), both of which its agent reads. The program's waits for them are always added
// up: two looks at the clock for each wait that does not end at once. Any thread.

/// True if the environment, or the agent, asks for them.
bool wanted() noexcept;

/// An operation has ended.
void add(const CollectiveEvent& event) noexcept;
/// Does not count this thread's waits as the program's: it is a thread of ours.
void leave_out_this_thread() noexcept;

/// The program has waited so long, which is in no Exposed.
void add_exposed(std::uint64_t ns) noexcept;

/// The program does nothing but wait as long as this lives. Within another one, nothing.
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
