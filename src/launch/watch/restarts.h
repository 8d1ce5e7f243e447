// Whether a job that broke down (a rank failed, or nothing went on) is started again. Pure; one thread.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace cohort::launch {

/// Why an attempt ended that might have gone well.
struct Breakdown {
  std::string text;   ///< "rank 1 on h failed after 10.0 s: exit code 1"
  std::string cause;  ///< "exit code 1": equal where two attempts broke down in the same way
  double after_seconds = 0;
};

class Restarts {
 public:
  /// A job that breaks down this soon has hardly made a step: so often in a row in the same way, and no restart will
  /// help.
  static constexpr double kSoonSeconds = 5;
  static constexpr int kSameInARow = 3;

  explicit Restarts(int most) : most_(most) {}

  int most() const noexcept { return most_; }
  /// How often the job has been started again; 0 in the first attempt.
  int done() const noexcept { return done_; }

  struct Decision {
    bool again = false;
    int number = 0;    ///< of the restart that follows
    std::string text;  ///< for the user; empty where restarts were never wanted
  };
  /// After an attempt that has ended like this.
  Decision after(const Breakdown& breakdown, int world_size);

 private:
  int most_;
  int done_ = 0;
  int same_ = 0;
  std::optional<std::string> last_;  ///< the cause
};

}  // namespace cohort::launch
