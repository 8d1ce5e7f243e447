// A thread that serves the library: signals are for the program's own threads.
#pragma once

#include <csignal>
#include <functional>
#include <thread>

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
/// Whether the calling thread was started so: then what it waits for does not hold up the program.
bool in_service_thread() noexcept;
/// The calling thread gives way to others, for good: a tenth of their share of the processor (nice 10), and of the disk
/// what nobody else wants, where its scheduler knows priorities (class idle). What the system refuses is left as it is.
void give_way() noexcept;

}  // namespace cohort::sys
