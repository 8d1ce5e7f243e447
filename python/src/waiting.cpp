#include "waiting.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>

namespace cohort::python {
namespace {

// The longest time that a KeyboardInterrupt may go unnoticed.
constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(50);

std::atomic<std::uint64_t> forks{0};

}  // namespace

bool on_main_thread() noexcept { return ::syscall(SYS_gettid) == ::getpid(); }

std::uint64_t fork_generation() noexcept { return forks.load(std::memory_order_relaxed); }

void watch_forks() {
  static const bool watched = [] {
    const int failed = ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    if (failed != 0) throw std::system_error(failed, std::generic_category(), "pthread_atfork");
    return true;
  }();
  static_cast<void>(watched);
}

bool wait_in_slices(const std::function<bool(std::chrono::nanoseconds)>& step, std::optional<Clock::time_point> until) {
  while (true) {
    std::chrono::nanoseconds slice = kSlice;
    if (until) slice = std::clamp<std::chrono::nanoseconds>(*until - Clock::now(), std::chrono::nanoseconds(0), kSlice);
    {
      const py::gil_scoped_release release;
      if (step(slice)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (until && Clock::now() >= *until) return false;
  }
}

std::optional<Clock::time_point> end_of(std::optional<std::chrono::nanoseconds> limit) {
  if (!limit) return std::nullopt;
  // Limited, so that adding it to the clock does not overflow.
  return Clock::now() + std::min<std::chrono::nanoseconds>(*limit, std::chrono::hours(24 * 365 * 100));
}

bool wait_until(const std::function<bool(std::optional<std::chrono::nanoseconds>)>& step,
                std::optional<Clock::time_point> until) {
  if (until || on_main_thread())
    return wait_in_slices([&](std::chrono::nanoseconds slice) { return step(slice); }, until);
  const py::gil_scoped_release release;
  return step(std::nullopt);
}

}  // namespace cohort::python
