// How many threads wait for what a communicator does, and until when: with none, ranks that wait for their peers leave
// the core to whoever computes. Any thread, but for the deadline (deadline.h).
#pragma once

#include "comm/control/deadline.h"
#include "sys/thread.h"

#include <atomic>

namespace cohort::comm {

struct Waiters {
  std::atomic<int> attended{0};        ///< threads that wait for results
  std::atomic<int> awaited{0};         ///< of these, the program's own
  std::atomic<bool> in_caller{false};  ///< the caller runs an operation itself: the same, without the cost of a count
  Deadline deadline;                   ///< of the running operation
};

/// Counts the caller among those who wait, as long as it lives.
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
