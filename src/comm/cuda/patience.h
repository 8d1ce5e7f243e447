// The steps of a wait for NCCL: short pauses, in which the other ranks are looked after. Belongs to the thread that
// runs operations.
#pragma once

#include "comm/direct.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace cohort::comm::cuda {

class Patience {
 public:
  explicit Patience(Direct::Ranks& ranks) noexcept : ranks_(ranks) {}
  /// Throws what ends the world.
  void step() {
    ranks_.attend();
    if (pause_.count() == 0) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause_);
    }
    pause_ = std::min(pause_ + std::chrono::microseconds(1), std::chrono::microseconds(100));
  }

 private:
  Direct::Ranks& ranks_;
  std::chrono::microseconds pause_{0};
};

}  // namespace cohort::comm::cuda
