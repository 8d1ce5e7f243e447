// Names of signals. SignalFd: signals that are read from a descriptor. It blocks its signals in the calling thread (and
// in threads started later) until it is destroyed; create it before any thread. Ignored signals (by nohup, in a shell's
// background job) stay ignored, and are never read.
// SignalLatch: remembers that signals have come. Until it is destroyed, it has handlers installed, which also call the
// previous handlers. Any number of latches per process, on any threads; any thread may call `received`. A handler that
// the program installs later must call the latch's, as handlers should.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <csignal>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::sys {

/// Returns "SIGKILL", "SIGRTMIN+3", or "signal 99" for a number that is no signal.
std::string signal_name(int number);

/// Returns the signals that this process ignores.
std::vector<int> ignored_signals();

class SignalFd {
 public:
  static Result<SignalFd> create(std::initializer_list<int> signals);
  SignalFd(SignalFd&&) noexcept = default;
  SignalFd& operator=(SignalFd&&) = delete;
  ~SignalFd();

  int fd() const noexcept { return fd_.get(); }
  /// The next pending signal's number; nullopt if there is none. Never waits.
  std::optional<int> next();

 private:
  SignalFd(UniqueFd fd, const sigset_t& before) : fd_(std::move(fd)), before_(before) {}
  UniqueFd fd_;
  sigset_t before_;
};

class SignalLatch {
 public:
  /// Fails with InvalidArgument for an empty list, for numbers that are no signals or cannot be handled (SIGKILL,
  /// SIGSTOP), and for signals of the program's own faults (SIGSEGV, ...), whose handlers must not return.
  static Result<SignalLatch> create(const std::vector<int>& signals);
  SignalLatch(SignalLatch&& other) noexcept;
  SignalLatch& operator=(SignalLatch&&) = delete;
  /// The last latch of a signal restores the previous handler, unless another handler has been installed meanwhile.
  ~SignalLatch();

  /// Keeps the handlers until the process ends, even after the latch is destroyed: a process that ends because of a
  /// signal may receive another one meanwhile.
  void keep_handlers() noexcept { keeps_handlers_ = true; }

  /// Returns the first of its signals that has come since the latch was made; 0 if none has.
  int received() const noexcept;

 private:
  struct Watched {
    int number;
    std::uint32_t before;  ///< number of times that the signal had come when the latch was made
  };
  explicit SignalLatch(std::vector<Watched> watched) : watched_(std::move(watched)) {}
  std::vector<Watched> watched_;
  bool keeps_handlers_ = false;
};

}  // namespace cohort::sys
