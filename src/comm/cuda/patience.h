// The steps of a wait for a GPU: short pauses, and, for the thread that runs operations, a look after the other ranks
// before each. Belongs to the thread that waits.
#pragma once

#include "comm/device_op.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace cohort::comm::cuda {

/// Longer and longer ones; none before the thread has been awake for a while, where it waits for what takes no longer.
class Pauses {
 public:
  explicit Pauses(std::chrono::microseconds longest = std::chrono::microseconds(100),
                  std::chrono::microseconds awake = {}) noexcept
      : longest_(longest), awake_(awake) {}
  void take() {
    if (pause_.count() == 0) {
      std::this_thread::yield();
      if (awake_.count() > 0 && Clock::now() - begun_ < awake_) return;
    } else {
      std::this_thread::sleep_for(pause_);
    }
    pause_ = std::min(pause_ + std::chrono::microseconds(1), longest_);
  }
  void begin_again() noexcept { pause_ = {}; }

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::microseconds longest_;
  const std::chrono::microseconds awake_;
  const Clock::time_point begun_ = Clock::now();
  std::chrono::microseconds pause_{0};
};

class Patience {
 public:
  explicit Patience(DeviceOp::Ranks& ranks) noexcept : ranks_(ranks) {}
  /// Throws what ends the world.
  void step() {
    ranks_.attend();
    pauses_.take();
  }

 private:
  DeviceOp::Ranks& ranks_;
  Pauses pauses_;
};

}  // namespace cohort::comm::cuda
