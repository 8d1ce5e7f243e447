// Whether a job whose rank has failed is started again. Pure; one thread.
#pragma once

#include "launch/post_mortem.h"

#include <chrono>
#include <optional>
#include <string>

namespace cohort::launch {

class Restarts {
 public:
  /// A rank that fails this soon has hardly made a step: so often in a row in the same way, and no restart will help.
  static constexpr double kSoonSeconds = 5;
  static constexpr int kSameInARow = 3;

  explicit Restarts(int most) : most_(most) {}

  int most() const noexcept { return most_; }
  /// How often the job has been started again; 0 in the first attempt.
  int done() const noexcept { return done_; }

  struct Decision {
    bool again = false;
    std::string text;  ///< for the user; empty where restarts were never wanted
  };
  /// After an attempt that `failure` has ended.
  Decision after(const Ending& failure, int world_size);

 private:
  int most_;
  int done_ = 0;
  int same_ = 0;
  std::optional<sys::ExitStatus> last_;
};

}  // namespace cohort::launch
