#include "sys/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace cohort::sys {

std::string signal_name(int number) {
  if (const char* name = sigabbrev_np(number)) return std::string("SIG") + name;
  if (number >= SIGRTMIN && number <= SIGRTMAX) return fmt::format("SIGRTMIN+{}", number - SIGRTMIN);
  return fmt::format("signal {}", number);
}

std::vector<int> ignored_signals() {
  std::vector<int> numbers;
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    const bool known = ::sigaction(number, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0;
    if (known && action.sa_handler == SIG_IGN) numbers.push_back(number);
  }
  return numbers;
}

Result<SignalFd> SignalFd::create(std::initializer_list<int> signals) {
  sigset_t set;
  sigset_t before;
  ::sigemptyset(&set);
  for (const int signal : signals) ::sigaddset(&set, signal);
  // (The kernel would queue them while they are blocked.)
  for (const int signal : ignored_signals()) ::sigdelset(&set, signal);
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, &before)) {
    return fail(ErrorCode::Internal, "pthread_sigmask: {}", errno_text(error));
  }
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) {
    const int error = errno;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return fail(ErrorCode::Unavailable, "signalfd: {}", errno_text(error));
  }
  return SignalFd(std::move(fd), before);
}

SignalFd::~SignalFd() {
  if (!fd_) return;
  // A signal that is still pending was not asked for by anyone who reads any more; it must not kill us now.
  while (next()) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> SignalFd::next() {
  signalfd_siginfo info{};
  const ssize_t got = ::read(fd_.get(), &info, sizeof info);
  if (got != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace cohort::sys
