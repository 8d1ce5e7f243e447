// Waits for descriptors and points in time, and calls back: a thin wrapper of Asio that keeps its headers in one file.
// One thread at a time. Watches and timers belong to their holders and may be destroyed in any callback, even their
// own; they must not outlive the Loop. The Loop does not own the descriptors.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace cohort::launch {

class Loop;

/// Calls back repeatedly while a descriptor is ready (level-triggered) and a callback is set. A regular file, for which
/// the kernel has no readiness, counts as always ready to read.
class Watch {
 public:
  Watch() = default;
  Watch(Loop& loop, int fd);
  Watch(Watch&&) noexcept = default;
  Watch& operator=(Watch&& other) noexcept;
  ~Watch();

  /// Sets the callback; an empty function removes it. Remove it, or destroy the Watch, before the descriptor is closed.
  void on_readable(std::function<void()> callback);
  void on_writable(std::function<void()> callback);
  explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Calls back once, after the given time.
class Timer {
 public:
  Timer() = default;
  Timer(Loop& loop, std::chrono::steady_clock::duration after, std::function<void()> callback);
  Timer(Timer&&) noexcept = default;
  Timer& operator=(Timer&& other) noexcept;
  ~Timer();
  explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

class Loop {
 public:
  Loop();
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// Runs until `stop`. Lets exceptions of callbacks through.
  void run();
  /// Waits for one event, and handles it.
  void step();
  /// Handles what is ready now, or waits for an event until `longest` has passed.
  void run_for(std::chrono::steady_clock::duration longest);
  void stop();
  bool stopped() const noexcept;

 private:
  friend class Watch;
  friend class Timer;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::launch
