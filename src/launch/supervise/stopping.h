// How a job is brought to its end: first as it was asked for (SIGINT, SIGTERM), then harder, each signal with its time,
// and a line now and then for whoever waits. Has the timers and the words; what the signals go to it does not know.
// Belongs to the supervisor and its thread.
#pragma once

#include "launch/loop.h"

#include <chrono>
#include <functional>
#include <string>

namespace cohort::launch {

class Stopping {
 public:
  using Milliseconds = std::chrono::milliseconds;
  struct Grace {
    Milliseconds usual{0};
    Milliseconds saving{0};  ///< where ranks save when they are asked, if it is longer
  };
  struct Events {
    /// Ranks get `signal`, and SIGKILL after the grace if they still run.
    std::function<void(int signal, Grace grace)> tell;
    /// Those that tell them have not answered in time.
    std::function<void()> give_up;
    std::function<int()> running_ranks;
    std::function<std::string()> running_others;  ///< "servers 0-1"; empty: none run
    std::function<void(const std::string&)> say;
  };
  /// `grace`: between one signal and the next, harder one.
  Stopping(Loop& loop, Milliseconds grace, Events events);

  /// The first reason counts; a further call makes it harder, or not. `grace` 0: at once.
  void begin(const std::string& reason, int signal, Grace grace);
  /// Some ranks save.
  void they_save();
  /// Told once more: SIGTERM after SIGINT, SIGKILL after SIGTERM.
  void hurry();
  void be_quiet() { quiet_ = true; }
  /// Nothing is left to be stopped.
  void finish();

  /// Empty while nothing is being stopped.
  const std::string& reason() const noexcept { return reason_; }

 private:
  using Clock = std::chrono::steady_clock;
  void announce();

  Loop& loop_;
  Milliseconds grace_;
  Events events_;
  std::string reason_;
  int signal_ = 0;  ///< the last one
  Milliseconds saving_{0};
  Clock::time_point began_;
  Clock::time_point limit_;
  bool announced_ = false;
  bool quiet_ = false;
  Timer notice_;
  Timer escalation_;
  Timer give_up_;
};

}  // namespace cohort::launch
