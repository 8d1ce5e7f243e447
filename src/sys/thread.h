// A thread that serves the library: signals are for the program's own threads.
#pragma once

#include <functional>
#include <thread>

namespace cohort::sys {

/// Starts a thread in which all signals are blocked. Throws std::system_error where there can be none.
std::thread start_without_signals(std::function<void()> body);

}  // namespace cohort::sys
