// Collectives of memory that no plane reaches: its elements are copied to host memory, where the planes carry the
// operation out, and back. One for each request, which the queue takes through its steps in this order; one thread at a
// time.
#pragma once

#include <chrono>

namespace cohort::comm {

class Staging {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Staging() = default;

  /// Waits until the input is in host memory; its copy began when the operation was asked for. Throws Timeout,
  /// Internal.
  virtual void arrive(Clock::time_point deadline) = 0;
  /// Starts the output's way back. Throws Internal.
  virtual void depart() = 0;
  /// Waits until the output is there, for whatever stream comes next. Throws Timeout, Internal.
  virtual void finish(Clock::time_point deadline) = 0;
};

}  // namespace cohort::comm
