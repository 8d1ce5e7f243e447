// Waiting inside a call from Python: without the GIL, so that other Python threads go on, and in slices, so that a
// KeyboardInterrupt ends it. Also detects forked children. Call with the GIL held unless said otherwise.
#pragma once

#include "base/thread.h"

#include <cohort/error.h>

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::python {
namespace py = pybind11;
using Clock = std::chrono::steady_clock;

/// Returns true on the main thread, the only one on which signals reach Python.
bool on_main_thread() noexcept;

/// Number of forks of this process and its ancestors since the module was loaded. It differs from the value at an
/// object's creation if and only if this is a forked child of the process that made the object. Any thread.
std::uint64_t fork_generation() noexcept;
void watch_forks();

/// Calls `step(slice)`, without the GIL, until it returns true, or returns false when `until` has passed. Between
/// slices Python's signal handlers run; their exceptions are thrown as py::error_already_set.
bool wait_in_slices(const std::function<bool(std::chrono::nanoseconds)>& step, std::optional<Clock::time_point> until);

/// Like wait_in_slices; if no interrupt is possible and there is no end, `step` is called once, without a limit.
bool wait_until(const std::function<bool(std::optional<std::chrono::nanoseconds>)>& step,
                std::optional<Clock::time_point> until);
/// Returns the time at which a limit, however long, has passed.
std::optional<Clock::time_point> end_of(std::optional<std::chrono::nanoseconds> limit);

/// Returns the result of `body`, which does not touch Python and runs without the GIL.
template <class Body>
auto without_gil(const Body& body) {
  const py::gil_scoped_release release;
  return body();
}

/// Runs `body`, which blocks and does not use Python. An interrupt calls `cancel`, which has to make `body` end soon;
/// if `cancel` is empty, the body goes on unattended and its result is dropped.
template <class T>
T run_interruptibly(std::function<T()> body, const std::function<void()>& cancel) {
  if (!on_main_thread()) return without_gil(body);
  auto task = std::make_shared<std::packaged_task<T()>>(std::move(body));
  std::future<T> result = task->get_future();
  std::thread thread = sys::start_without_signals([task] { (*task)(); });
  task.reset();
  try {
    wait_in_slices([&](std::chrono::nanoseconds slice) { return result.wait_for(slice) == std::future_status::ready; },
                   std::nullopt);
  } catch (py::error_already_set&) {
    const py::gil_scoped_release release;
    if (cancel) {
      cancel();
      thread.join();
    } else {
      thread.detach();
    }
    throw;
  }
  const py::gil_scoped_release release;
  thread.join();
  return result.get();
}

/// Operations under way, kept alive with their arrays even if others drop their references. Each owner (Member,
/// NamedWorld) has one. Each operation has `done()` and `wait(limit)`, which returns false if the operation is not over
/// by then.
template <class OneOperation>
class Unfinished {
 public:
  explicit Unfinished(std::size_t least) : least_(least), tidy_at_(least) {}

  void keep(std::shared_ptr<OneOperation> operation) { running_.push_back(std::move(operation)); }

  /// Call it before keeping an operation. Releases the leading operations that are done: most of them, since operations
  /// end in order. Checks all operations only when there are twice as many as the last check left, so that it takes
  /// constant time per operation.
  void tidy() {
    if (running_.size() >= tidy_at_) return reap();
    const auto unfinished =
        std::find_if(running_.begin(), running_.end(), [](const auto& operation) { return !operation->done(); });
    let_go(running_.begin(), unfinished);
  }

  /// Releases the operations that are done.
  void reap() {
    const auto first_finished = std::stable_partition(running_.begin(), running_.end(),
                                                      [](const auto& operation) { return !operation->done(); });
    const auto finished = let_go(first_finished, running_.end());
    tidy_at_ = std::max(least_, 2 * running_.size());
  }

  bool any() {
    reap();
    return !running_.empty();
  }

  /// Returns the first operation that is not done; null if there is none.
  std::shared_ptr<OneOperation> next() { return any() ? running_.front() : nullptr; }

  /// Waits until all are over, with or without an error; returns false if they are not over at `until`.
  bool finish(std::optional<Clock::time_point> until) {
    while (const auto operation = next()) {
      std::optional<std::chrono::nanoseconds> limit;
      if (until) limit = std::max<std::chrono::nanoseconds>(*until - Clock::now(), std::chrono::nanoseconds(0));
      try {
        if (!operation->wait(limit)) return false;
      } catch (const Error&) {
        // The caller that waits for the operation, or its destructor's warning, reports the error; here it only has to
        // be over.
      }
    }
    return true;
  }

 private:
  using All = std::deque<std::shared_ptr<OneOperation>>;

  /// Destroying the result can run any Python code.
  std::vector<std::shared_ptr<OneOperation>> let_go(typename All::iterator begin, typename All::iterator end) {
    std::vector<std::shared_ptr<OneOperation>> gone(std::make_move_iterator(begin), std::make_move_iterator(end));
    running_.erase(begin, end);
    return gone;
  }

  const std::size_t least_;
  All running_;
  std::size_t tidy_at_;
};

/// A thread that reports finished operations, so that the core's threads wait neither for Python nor for later
/// computation. Calls `tell(const std::deque<Item>&)`, declared beside Item. Any thread may call. Never destroyed: an
/// engine of an abandoned world may still refer to it. A forked child does not touch its parent's.
template <class Item>
class CompletionThread {
 public:
  static CompletionThread& get() {
    const std::lock_guard lock(guard());
    if (current() == nullptr || current()->home_ != fork_generation()) current() = new CompletionThread();
    return *current();
  }

  /// Ends the thread, after it has reported finished operations. The thread is started again when needed.
  static void stop() {
    CompletionThread* ending = nullptr;
    {
      const std::lock_guard lock(guard());
      if (current() == nullptr || current()->home_ != fork_generation()) return;
      ending = std::exchange(current(), nullptr);
    }
    {
      const std::lock_guard lock(ending->mutex_);
      ending->stopping_ = true;
    }
    ending->changed_.notify_one();
    ending->thread_.join();
  }

  void push(Item done) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(done));
    }
    changed_.notify_one();
  }

 private:
  CompletionThread() : thread_(sys::start_without_signals([this] { run(); })) {}

  static std::mutex& guard() {
    static auto* const mutex = new std::mutex();
    return *mutex;
  }
  static CompletionThread*& current() {
    static CompletionThread* one = nullptr;
    return one;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::deque<Item> taken = std::exchange(queue_, {});
      lock.unlock();
      tell(taken);
      taken.clear();
      lock.lock();
    }
  }

  const std::uint64_t home_ = fork_generation();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace cohort::python
