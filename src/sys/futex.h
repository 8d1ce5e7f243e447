// Sleeping on a 32-bit word that several processes map. Any thread; wake-ups may be spurious, so check again.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace cohort::sys {

/// Sleeps while `word` is `seen`, at most `limit`.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::nanoseconds limit) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec relative{static_cast<time_t>(seconds.count()), static_cast<long>((limit - seconds).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

/// Wakes all who sleep on `word`, in whatever process.
inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace cohort::sys
