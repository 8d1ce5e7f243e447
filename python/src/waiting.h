// Waiting inside a call from Python: without the GIL, so that other Python threads go on, and in slices, so that a
// KeyboardInterrupt ends it. Also tells a forked child from its parent. Call with the GIL held unless said otherwise.
#pragma once

#include "base/thread.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <utility>

namespace cohort::python {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

/// Signals reach Python on this thread only.
bool on_main_thread() noexcept;

/// How often this process and its ancestors have been forked since the module was loaded: differs from the value an
/// object was made with if and only if this is a forked child of the process that made it. Any thread.
std::uint64_t fork_generation() noexcept;
void watch_forks();

/// Calls `step(slice)`, without the GIL, until it says true or `until` has passed (then: false). Between slices
/// Python's signal handlers run; what they raise is thrown as py::error_already_set.
bool wait_in_slices(const std::function<bool(std::chrono::nanoseconds)>& step, std::optional<Clock::time_point> until);

/// Runs `body`, which blocks and knows nothing of Python. An interrupt calls `cancel`, which has to make `body` end
/// soon; where there is no such way (`cancel` is empty) the body goes on unattended and its result is dropped.
template <class T>
T run_interruptibly(std::function<T()> body, const std::function<void()>& cancel) {
  if (!on_main_thread()) {
    const py::gil_scoped_release release;
    return body();
  }
  auto task = std::make_shared<std::packaged_task<T()>>(std::move(body));
  std::future<T> result = task->get_future();
  std::thread thread = sys::start_without_signals([task] { (*task)(); });
  task.reset();
  try {
    wait_in_slices([&](std::chrono::nanoseconds slice) { return result.wait_for(slice) == std::future_status::ready; },
                   std::nullopt);
  } catch (py::error_already_set&) {
    const py::gil_scoped_release release;
    if (cancel) {
      cancel();
      thread.join();
    } else {
      thread.detach();
    }
    throw;
  }
  const py::gil_scoped_release release;
  thread.join();
  return result.get();
}

}  // namespace cohort::python
