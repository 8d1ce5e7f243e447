// Signals by name, and signals as something to read. A SignalFd blocks its signals in the calling thread (and in
// threads started later) until it is destroyed; create it before any thread. Signals that are ignored (by nohup, in a
// shell's background job) stay so: they do not come.
#pragma once

#include "base/result.h"
#include "sys/unique_fd.h"

#include <csignal>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::sys {

/// "SIGKILL"; "SIGRTMIN+3"; "signal 99" for what is none.
std::string signal_name(int number);

/// Those that this process ignores.
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

}  // namespace cohort::sys
