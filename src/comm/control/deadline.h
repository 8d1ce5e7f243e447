// Until when the running operation may wait for others, and what is said of those who do not come. Belongs to the
// thread that runs operations; `limit` from any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `called` zero: from `begin_now` on, since taking the time takes as long as a small operation.
  void begin(Clock::time_point called, std::chrono::milliseconds timeout) noexcept {
    called_ = called;
    timeout_ = timeout;
  }
  void begin_now() noexcept {
    if (called_ == Clock::time_point{}) called_ = Clock::now();
  }
  /// No wait may take longer than this: operations behind this one have deadlines too. Any thread.
  void limit(Clock::time_point limit) noexcept {
    limit_.store(limit.time_since_epoch().count(), std::memory_order_relaxed);
  }
  Clock::time_point when() const noexcept;
  /// "after 300 ms".
  std::string after() const;

 private:
  Clock::time_point limit() const noexcept {
    return Clock::time_point(Clock::duration(limit_.load(std::memory_order_relaxed)));
  }

  Clock::time_point called_{};
  std::chrono::milliseconds timeout_{0};
  std::atomic<Clock::rep> limit_{std::numeric_limits<Clock::rep>::max()};
};

/// An operation and the rank that waits in it, as messages speak of them.
struct RunningOperation {
  std::string text;  ///< "all_reduce(float32[10], sum)"
  std::uint64_t number = 0;
  int rank = 0;
  std::string_view host;
};

/// `described` of each rank that is missing; of many, some.
std::string list_missing(const std::vector<int>& missing, const std::function<std::string(int)>& described);
std::string timeout_text(const RunningOperation& operation, const Deadline& deadline, const std::string& missing);
/// `pid`: "pid 12", or empty. `how`: what shows that the peer will not come.
std::string lost_text(const RunningOperation& operation, int peer, std::string_view host, std::string_view pid,
                      std::string_view how);

}  // namespace cohort::comm
