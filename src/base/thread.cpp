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
  // Both are of the thread alone, whatever setpriority's manual calls them. glibc has no ioprio_set.
  // With less than nice 10, one that has to wait for the thread on busy processors would wait for minutes.
  constexpr int kNice = 10, kWhoProcess = 1, kIdle = 3 << 13;
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice));
  static_cast<void>(::syscall(SYS_ioprio_set, kWhoProcess, 0, kIdle));
}

SignalsBlocked::SignalsBlocked() {
  sigset_t blocked;
  sigfillset(&blocked);
  // The system delivers a fault in spite of the mask, but to no handler: the process ends without its last words.
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
