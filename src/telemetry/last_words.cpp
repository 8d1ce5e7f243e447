#include "telemetry/last_words.h"

#include "telemetry/status_page.h"
#include "telemetry/trace_text.h"

#include <cohort/error.h>

#include <cxxabi.h>
#include <stdio_ext.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <typeinfo>

namespace cohort::status {
namespace {

constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr std::size_t kAlternateStack = 64 << 10;

std::terminate_handler terminate_before = nullptr;
std::atomic<int> interpreter_fd{-1};
// Of its own each: an exception's terminate handler ends in SIGABRT, and SIGQUIT may come at any time.
TraceText of_exception;
TraceText of_signal;
TraceText of_stacks;

std::string_view name_of_fatal(int number) noexcept {
  switch (number) {
    case SIGSEGV: return "SIGSEGV";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGILL: return "SIGILL";
    default: return "SIGABRT";
  }
}

void add_type(TraceText& text) noexcept {
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (type == nullptr) {
    text.add("exception of an unknown type");
    return;
  }
  int status = -1;
  char* const readable = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  text.add(readable != nullptr ? readable : type->name());
  std::free(readable);
}

void add_context(TraceText& text, const Error& error) noexcept {
  const ErrorContext& context = error.context();
  text.add("\n  code ").add(to_string(error.code()));
  if (context.rank >= 0) text.add(", rank ").add_number(context.rank);
  if (!context.host.empty()) text.add(", host ").add(context.host);
  if (context.peer >= 0) text.add(", peer ").add_number(context.peer);
  if (!context.operation.empty()) text.add(", operation ").add(context.operation);
  if (context.sequence != 0) text.add(", number ").add_number(static_cast<std::int64_t>(context.sequence));
}

void add_exception(TraceText& text, int depth) noexcept;

void add_cause(TraceText& text, const std::exception& error, int depth) noexcept {
  constexpr int kMostCauses = 5;
  if (depth == kMostCauses) return;
  try {
    std::rethrow_if_nested(error);
  } catch (...) {
    text.add("\n  caused by ");
    add_exception(text, depth + 1);
  }
}

// libtorch's errors have a hundred lines of stack frames behind what they say; a stack of our own follows.
std::string_view without_frames(std::string_view what) noexcept { return what.substr(0, what.find("\nframe #0: ")); }

// The exception being handled.
void add_exception(TraceText& text, int depth) noexcept {
  add_type(text);
  try {
    throw;
  } catch (const Error& error) {
    text.add(": ").add(error.what());
    add_context(text, error);
    // Whatever was made of it on its way, a lost peer is what it comes from.
    const bool follows = error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Aborted;
    if (depth == 0 || follows) StatusPage::own().note_end(error);
    add_cause(text, error, depth);
  } catch (const std::exception& error) {
    text.add(": ").add(without_frames(error.what()));
    add_cause(text, error, depth);
  } catch (...) {
    // its type is all there is
  }
}

[[noreturn]] void on_terminate() noexcept {
  static std::atomic<bool> entered{false};
  if (!entered.exchange(true)) {
    TraceText& text = of_exception;
    text.clear();
    if (std::current_exception() != nullptr) {
      text.add(kUncaught);
      add_exception(text, 0);
    } else {
      text.add("std::terminate without an exception (a joinable std::thread destroyed?)");
    }
    StatusPage& page = StatusPage::own();
    if (page.say_last_words(text.add("\n").view())) {
      text.clear();
      // Where nothing could catch it, nothing has been unwound, and the throw is on the stack. A noexcept function that
      // it ran into has already given up what lay below.
      text.add(kThrowStack);
      add_backtrace(text, 1, Symbols::Demangled);
      page.add_last_words(text.view());
    }
  }
  if (terminate_before != nullptr) terminate_before();
  std::abort();
}

void on_fatal_signal(int number, siginfo_t* info, void* /*context*/) {
  const int error_number = errno;
  static std::atomic<bool> entered{false};
  if (!entered.exchange(true)) {
    TraceText& text = of_signal;
    text.clear();
    text.add("fatal signal ").add(name_of_fatal(number));
    if (info != nullptr && info->si_code > 0 && number != SIGABRT) {
      text.add(" at address 0x").add_hex(reinterpret_cast<std::uintptr_t>(info->si_addr));
    } else if (info != nullptr && info->si_code <= 0 && info->si_pid != ::getpid()) {
      text.add(" sent by process ").add_number(info->si_pid);
    }
    text.add("\n");
    const int fd = interpreter_fd.load();
    if (fd >= 0) text.add_file(fd);
    StatusPage& page = StatusPage::own();
    // What is certain first: walking a broken stack may end in a second fault, which the kernel does not forgive.
    if (page.say_last_words(text.view())) {
      text.clear();
      text.add(kNativeStack);
      add_backtrace(text, 1, Symbols::Raw);
      page.add_last_words(text.view());
    }
  }
  ::signal(number, SIG_DFL);
  // It is blocked until this handler returns, and then comes at the place of the fault.
  ::raise(number);
  errno = error_number;
}

void on_quit(int /*number*/) {
  const int error_number = errno;
  static std::atomic<bool> busy{false};
  const StatusPage& page = StatusPage::own();
  if (page.layout().pid.load() != ::getpid()) {  // a fork of the rank: for it the signal means what it always does
    ::signal(SIGQUIT, SIG_DFL);
    ::raise(SIGQUIT);
    return;
  }
  const int fd = page.fd();
  if (!busy.exchange(true)) {
    TraceText& text = of_stacks;
    text.clear();
    text.add("thread ").add_number(static_cast<std::int64_t>(::syscall(SYS_gettid))).add(":\n");
    add_backtrace(text, 1, Symbols::Raw);
    add_other_threads(text);
    std::string_view rest = text.view();
    while (!rest.empty()) {
      const ssize_t put = ::write(fd, rest.data(), rest.size());
      if (put > 0) rest.remove_prefix(static_cast<std::size_t>(put));
      if (put < 0 && errno != EINTR) break;
    }
    busy.store(false);
  }
  errno = error_number;
}

bool is_default(int number) noexcept {
  struct sigaction now = {};
  return ::sigaction(number, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL;
}

// So that a stack overflow can be told of.
void provide_alternate_stack() noexcept {
  alignas(64) static std::byte memory[kAlternateStack];
  stack_t now = {};
  if (::sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
  stack_t wanted = {};
  wanted.ss_sp = memory;
  wanted.ss_size = sizeof memory;
  (void)::sigaltstack(&wanted, nullptr);
}

}  // namespace

void keep_last_words() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (StatusPage::own().fd() < 0) return;
    prepare_traces();
    terminate_before = std::set_terminate(on_terminate);
    provide_alternate_stack();
    for (const int number : kFatalSignals) {
      if (!is_default(number)) continue;  // a sanitizer's, the program's, or ignored
      struct sigaction action = {};
      action.sa_sigaction = on_fatal_signal;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      ::sigemptyset(&action.sa_mask);
      (void)::sigaction(number, &action, nullptr);
    }
  });
}

void tell_stacks_when_asked() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (StatusPage::own().fd() < 0 || !is_default(SIGQUIT)) return;
    prepare_traces();
    struct sigaction action = {};
    action.sa_handler = on_quit;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    if (::sigaction(SIGQUIT, &action, nullptr) == 0) StatusPage::own().announce_stacks();
  });
}

void show_lines_at_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (StatusPage::own().fd() < 0 || __flbf(stdout) != 0 || __fbufsize(stdout) == 1) return;
    // glibc lets a stream that is in use change over, and goes by it once its buffer is empty.
    (void)std::setvbuf(stdout, nullptr, _IOLBF, 0);
    (void)std::fflush(stdout);
  });
}

void add_to_last_words(int fd) noexcept { interpreter_fd.store(fd); }

}  // namespace cohort::status
