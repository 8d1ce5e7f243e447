#include "base/thread.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <utility>

namespace cohort::sys {

namespace {
thread_local bool serves = false;
}  // namespace

bool in_service_thread() noexcept { return serves; }

void give_way() noexcept {
  // Both settings affect only this thread, although setpriority's manual says process. glibc has no ioprio_set.
  // At a lower priority than nice 10, waiting for this thread on busy processors would take minutes.
  constexpr int kNice = 10, kWhoProcess = 1, kIdle = 3 << 13;
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice));
  static_cast<void>(::syscall(SYS_ioprio_set, kWhoProcess, 0, kIdle));
}

SignalsBlocked::SignalsBlocked() {
  sigset_t blocked;
  sigfillset(&blocked);
  // If a fault's signal is blocked, the system ends the process without calling a handler, so it leaves no last words.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&blocked, fault);
  ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
}

SignalsBlocked::~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

std::thread start_without_signals(std::function<void()> body) {
  const SignalsBlocked blocked;
  return std::thread([body = std::move(body)] {
    serves = true;
    body();
  });
}

}  // namespace cohort::sys
