// A thread that serves the library: signals are for the program's own threads.
// Sleeping on a 32-bit word that several processes map. Any thread; wake-ups may be spurious, so check again.
// A moment of spinning that leaves the core's resources to its other thread. Any thread.
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

/// While it lives, signals are blocked in the calling thread, and for good in the threads that it starts meanwhile; not
/// those of a thread's own faults (SIGSEGV, SIGBUS, SIGABRT, ...), for which the program may have handlers.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// Starts a thread in which signals are blocked as by SignalsBlocked. Throws std::system_error where there can be none.
std::thread start_without_signals(std::function<void()> body);
/// True if the calling thread was started by start_without_signals: then its waits do not hold up the program.
bool in_service_thread() noexcept;
/// Lowers the calling thread's priority for good: a tenth of others' share of the processor (nice 10), and only idle
/// time of the disk, if its scheduler knows priorities (class idle). Settings that the system refuses stay as they are.
void give_way() noexcept;

/// Sleeps while `word` is `seen`, at most `limit`.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::nanoseconds limit) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec relative{static_cast<time_t>(seconds.count()), static_cast<long>((limit - seconds).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

/// Wakes all threads that sleep on `word`, in whatever process.
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
