#include "sys/thread.h"

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
