// The Work of an operation that was not over at once, whoever carries it out: the queue of collectives, or one of the
// places where sends and receives are matched. All of it but `done` belongs to the carrier's mutex; the outcome does
// not change once it is done. Any thread may call.
#pragma once

#include "comm/work_state.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cohort::comm {

class PendingWork;

/// Who carries operations out, and lets threads wait for them.
class Carrier {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Carrier() = default;
  /// False if the work is not done by then. May carry out operations meanwhile.
  virtual bool wait_until(PendingWork& work, Clock::time_point limit) = 0;
  virtual void add_callback(PendingWork& work, std::function<void()> callback) = 0;
  virtual bool in_child() const noexcept = 0;
};

class PendingWork : public WorkState {
 public:
  using Clock = Carrier::Clock;

  void wait() final { carrier_.wait_until(*this, Clock::time_point::max()); }
  bool wait_for(std::chrono::nanoseconds limit) final {
    constexpr auto kLongest = std::chrono::hours(24 * 365);
    return done() || carrier_.wait_until(*this, Clock::now() + std::min<std::chrono::nanoseconds>(limit, kLongest));
  }
  bool done() const noexcept final { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept final { return outcome_; }
  void on_done(std::function<void()> callback) final { carrier_.add_callback(*this, std::move(callback)); }
  bool at_home() const noexcept final { return !carrier_.in_child(); }

  // For the carrier, which holds its mutex:
  void set_outcome(std::optional<Error> outcome) noexcept { outcome_ = std::move(outcome); }
  /// Its outcome has been set.
  void set_done() noexcept { done_.store(true, std::memory_order_release); }
  bool has_callbacks() const noexcept { return !callbacks_.empty(); }
  std::vector<std::function<void()>> take_callbacks() noexcept { return std::exchange(callbacks_, {}); }
  /// For the carrier, which does not hold it.
  template <class Mutex>
  void add_callback(Mutex& mutex, std::function<void()> callback) {
    {
      const std::lock_guard lock(mutex);
      if (!done()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

 protected:
  /// `keep` keeps the carrier alive.
  PendingWork(Carrier& carrier, std::shared_ptr<void> keep) noexcept : carrier_(carrier), keep_(std::move(keep)) {}

 private:
  Carrier& carrier_;
  const std::shared_ptr<void> keep_;
  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;  // written before done_
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace cohort::comm
