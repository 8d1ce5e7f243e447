// The steps of a wait for a GPU: short pauses, and, for the thread that runs operations, a look after the other ranks
// before each. Belongs to the thread that waits.
#pragma once

#include "comm/direct.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace cohort::comm::cuda {

/// Longer and longer ones.
class Pauses {
 public:
  void take() {
    if (pause_.count() == 0) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause_);
    }
    pause_ = std::min(pause_ + std::chrono::microseconds(1), std::chrono::microseconds(100));
  }

 private:
  std::chrono::microseconds pause_{0};
};

class Patience {
 public:
  explicit Patience(Direct::Ranks& ranks) noexcept : ranks_(ranks) {}
  /// Throws what ends the world.
  void step() {
    ranks_.attend();
    pauses_.take();
  }

 private:
  Direct::Ranks& ranks_;
  Pauses pauses_;
};

}  // namespace cohort::comm::cuda
