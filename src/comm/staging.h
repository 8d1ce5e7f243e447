// Collectives of device memory: its elements are copied to host memory, where the planes carry the operation out, and
// back. One for each request, which the queue takes through its steps in this order; one thread at a time.
#pragma once

#include <chrono>
#include <functional>

namespace cohort::comm {

class Staging {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Staging() = default;

  /// Called again and again while something is waited for: checks the other ranks, and throws what ends the world.
  using Attend = std::function<void()>;

  /// Waits until the input is in host memory; its copy began when the operation was asked for. Throws Timeout,
  /// Internal.
  virtual void arrive(Clock::time_point deadline, const Attend& attend) = 0;
  /// Starts the copy of the output back. Throws Internal.
  virtual void depart() = 0;
  /// Whether the output is there, for whatever stream comes next. Throws Internal.
  virtual bool is_there() const = 0;
  /// Waits until it is. Throws Timeout, Internal.
  virtual void finish(Clock::time_point deadline, const Attend& attend) = 0;
};

}  // namespace cohort::comm
