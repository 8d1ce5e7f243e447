// How a job is brought to its end, and what else comes to it from the caller: the owner's end and stdin. All belong to
// the supervisor and its thread.
#pragma once

#include "base/unique_fd.h"
#include "launch/loop.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace cohort::launch {

/// The process that a job belongs to (--owner): its end ends the job, and its private folder goes then, which it can no
/// longer remove itself.
class Owner {
 public:
  /// Throws cohort::Error (Unavailable) if `pid` is not this process's parent.
  Owner(Loop& loop, int pid, std::function<void()> on_gone);

  bool gone() const noexcept { return gone_; }

 private:
  bool gone_ = false;
  sys::UniqueFd process_;
  Watch watch_;
};

/// Removes a folder that is this user's alone (0700); leaves any other.
void remove_private_folder(const std::string& path);

/// Reads this process's stdin for rank 0, no faster than rank 0 reads, where that cannot have it itself: a terminal,
/// and a rank on another host.
class InputReader {
 public:
  /// Hands over what comes in; empty: the end, once.
  using OnInput = std::function<void(std::string)>;
  InputReader(Loop& loop, int fd, OnInput on_input);

  /// So many bytes have gone on to the rank.
  void taken(std::uint64_t bytes);
  /// A terminal is read only from the foreground, since reading from the background stops a process; ask again after
  /// SIGCONT.
  void look_again();

  /// False for a closed descriptor and for /dev/null.
  static bool worth_reading(int fd);
  /// True for what a rank on this host can have itself: then nothing is taken from the caller that no rank reads. A
  /// terminal it cannot, since it would read that in the background, too.
  static bool may_be_given(int fd);

 private:
  void read_some();
  void update();

  int fd_;
  OnInput on_input_;
  Watch watch_;
  std::uint64_t under_way_ = 0;
  bool ended_ = false;
};

/// First as it was asked for (SIGINT, SIGTERM), then harder, each signal with its time, and a line now and then for
/// whoever waits. Has the timers and the words; what the signals go to it does not know.
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
