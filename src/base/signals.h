// Signals by name, and signals as something to read. A SignalFd blocks its signals in the calling thread (and in
// threads started later) until it is destroyed; create it before any thread. Signals that are ignored (by nohup, in a
// shell's background job) stay so: they do not come.
// Remembers that signals have come. Installs handlers while it lives; a handler that was there before is called as
// well, after it. Any number of latches per process, on any threads; `received` may be asked from any thread. A handler
// that the program installs later is left alone: it has to call the one before, as handlers should.
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

/// "SIGKILL"; "SIGRTMIN+3"; "signal 99" for what is none.
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
  /// Fails with InvalidArgument for no signals, for what is no signal or cannot be handled (SIGKILL, SIGSTOP), and for
  /// those that a fault of the program raises (SIGSEGV, ...), to which a handler must not return.
  static Result<SignalLatch> create(const std::vector<int>& signals);
  SignalLatch(SignalLatch&& other) noexcept;
  SignalLatch& operator=(SignalLatch&&) = delete;
  /// The last latch of a signal puts back what was there before, unless another handler has been installed over it.
  ~SignalLatch();

  /// Its handlers stay when it goes, for the rest of the process: a process that ends because of a signal may be
  /// signalled once more on its way out.
  void keep_handlers() noexcept { keeps_handlers_ = true; }

  /// The first of its signals that has come since it was made; 0: none has.
  int received() const noexcept;

 private:
  struct Watched {
    int number;
    std::uint32_t before;  ///< how often it had come when the latch was made
  };
  explicit SignalLatch(std::vector<Watched> watched) : watched_(std::move(watched)) {}
  std::vector<Watched> watched_;
  bool keeps_handlers_ = false;
};

}  // namespace cohort::sys
