// Work that waits for others, done side by side where the system grants threads: `ulimit -u` may not, and a doctor
// names that instead of failing by it. The result joins the thread when it goes. Any thread.
#pragma once

#include <functional>
#include <system_error>
#include <thread>

namespace cohort::doctor {

/// Does `work` in a thread of its own; where there is none to be had, at once.
inline std::jthread beside(const std::function<void()>& work) {
  try {
    return std::jthread(work);
  } catch (const std::system_error&) {
    work();
    return {};
  }
}

}  // namespace cohort::doctor
