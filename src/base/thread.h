// Threads of the library, in which signals are blocked: signals are for the program's own threads.
// futex_wait: sleeps on a 32-bit word that several processes map. Any thread; wake-ups may be spurious, so check again.
// cpu_relax: a pause in a spin loop that leaves the core's resources to its other hardware thread. Any thread.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <functional>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace cohort::sys {

/// While this object exists, signals are blocked in the calling thread, and permanently in threads that it starts
/// meanwhile. Exceptions are signals of a thread's own faults (SIGSEGV, SIGBUS, SIGABRT, ...), for which the program
/// may have handlers.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// Starts a thread in which signals are blocked as by SignalsBlocked. Throws std::system_error if it cannot start.
std::thread start_without_signals(std::function<void()> body);
/// True if start_without_signals has started the calling thread, so that its waits do not delay the program.
bool in_service_thread() noexcept;
/// Permanently lowers the calling thread's priority: to a tenth of other threads' share of the processor (nice 10), and
/// to the disk's idle times (class idle) if its scheduler has priorities. Ignores settings that the system refuses.
void give_way() noexcept;

/// Sleeps while `word` equals `seen`, for `limit` at most.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::nanoseconds limit) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec relative{static_cast<time_t>(seconds.count()), static_cast<long>((limit - seconds).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

/// Wakes all threads, in any process, that sleep on `word`.
inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace cohort::sys
