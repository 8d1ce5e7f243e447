// A thread that tells of finished operations, so that the engine's waits neither for Python nor for what is computed
// next. `tell(const std::deque<Item>&)`, beside Item, is called on it. Any thread may call.
#pragma once

#include "named.h"

#include "base/thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace cohort::python {

/// Never destroyed: an engine of a world that was given up may still refer to it. One of a parent is not touched in its
/// forked child.
template <class Item>
class CompletionThread {
 public:
  static CompletionThread& get() {
    const std::lock_guard lock(guard());
    if (current() == nullptr || current()->home_ != fork_generation()) current() = new CompletionThread();
    return *current();
  }

  /// Ends the thread, once it has told what is done. It starts anew when it is needed.
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
