#include "sys/thread.h"

#include <csignal>
#include <utility>

namespace cohort::sys {

namespace {
thread_local bool serves = false;
}  // namespace

bool in_service_thread() noexcept { return serves; }

std::thread start_without_signals(std::function<void()> body) {
  // A thread begins with its starter's mask.
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const Blocked blocked;
  return std::thread([body = std::move(body)] {
    serves = true;
    body();
  });
}

}  // namespace cohort::sys
