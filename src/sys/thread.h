// A thread that serves the library: signals are for the program's own threads.
#pragma once

#include <functional>
#include <thread>

namespace cohort::sys {

/// Starts a thread in which all signals are blocked. Throws std::system_error where there can be none.
std::thread start_without_signals(std::function<void()> body);
/// Whether the calling thread was started so: then what it waits for does not hold up the program.
bool in_service_thread() noexcept;
/// The calling thread gives way to others, for good: a tenth of their share of the processor (nice 10), and of the disk
/// what nobody else wants, where its scheduler knows priorities (class idle). What the system refuses is left as it is.
void give_way() noexcept;

}  // namespace cohort::sys
