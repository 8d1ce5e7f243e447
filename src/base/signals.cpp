#include "base/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <utility>

namespace cohort::sys {

std::string signal_name(int number) {
  if (const char* name = sigabbrev_np(number)) return std::string("SIG") + name;
  if (number >= SIGRTMIN && number <= SIGRTMAX) return fmt::format("SIGRTMIN+{}", number - SIGRTMIN);
  return fmt::format("signal {}", number);
}

std::vector<int> ignored_signals() {
  std::vector<int> numbers;
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    const bool known = ::sigaction(number, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0;
    if (known && action.sa_handler == SIG_IGN) numbers.push_back(number);
  }
  return numbers;
}

Result<SignalFd> SignalFd::create(std::initializer_list<int> signals) {
  sigset_t set;
  sigset_t before;
  ::sigemptyset(&set);
  for (const int signal : signals) ::sigaddset(&set, signal);
  // Excludes ignored signals, which the kernel would queue while they are blocked.
  for (const int signal : ignored_signals()) ::sigdelset(&set, signal);
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &set, &before)) {
    return fail(ErrorCode::Internal, "pthread_sigmask: {}", errno_text(error));
  }
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) {
    const int error = errno;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return fail(ErrorCode::Unavailable, "signalfd: {}", errno_text(error));
  }
  return SignalFd(std::move(fd), before);
}

SignalFd::~SignalFd() {
  if (!fd_) return;
  // Consumes pending signals, which have no reader any more, since they would end the process when they are unblocked.
  while (next()) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> SignalFd::next() {
  signalfd_siginfo info{};
  const ssize_t got = ::read(fd_.get(), &info, sizeof info);
  if (got != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

namespace {

constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};

/// State of one signal. The handler reads `before`, which is written before the handler is installed.
struct Slot {
  std::atomic<std::uint32_t> received{0};
  struct sigaction before = {};
  int latches = 0;
  bool installed = false;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a signal handler may not take a lock");

Slot slots[NSIG];
std::mutex slots_mutex;  // guards all but `received`

void on_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  Slot& slot = slots[number];
  slot.received.fetch_add(1, std::memory_order_relaxed);
  const struct sigaction& before = slot.before;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_signal;
}

bool may_be_handled(int number) {
  return number > 0 && number < NSIG && number != SIGKILL && number != SIGSTOP &&
         std::find(std::begin(kFaults), std::end(kFaults), number) == std::end(kFaults);
}

/// Returns false if the system refuses the signal (numbers that the C library reserves).
bool install(int number) {
  const std::lock_guard lock(slots_mutex);
  Slot& slot = slots[number];
  // If a later handler calls ours, ours must not call that handler, or the calls would never end.
  if (!slot.installed) {
    if (::sigaction(number, nullptr, &slot.before) != 0) return false;
    struct sigaction action = {};
    action.sa_sigaction = &on_signal;
    // The program's system calls are restarted; the handler runs on an alternate stack if the program has set one.
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    if (::sigaction(number, &action, nullptr) != 0) return false;
    slot.installed = true;
  }
  ++slot.latches;
  return true;
}

void uninstall(int number) {
  const std::lock_guard lock(slots_mutex);
  Slot& slot = slots[number];
  if (--slot.latches > 0) return;
  struct sigaction now = {};
  if (::sigaction(number, nullptr, &now) != 0 || !is_ours(now)) return;
  slot.installed = ::sigaction(number, &slot.before, nullptr) != 0;
}

}  // namespace

Result<SignalLatch> SignalLatch::create(const std::vector<int>& signals) {
  if (signals.empty()) return fail(ErrorCode::InvalidArgument, "no signals to wait for");
  for (const int number : signals) {
    if (!may_be_handled(number)) {
      return fail(ErrorCode::InvalidArgument, "{} cannot be waited for -- SIGUSR1 and SIGTERM can, for example",
                  signal_name(number));
    }
  }
  SignalLatch latch({});
  for (const int number : signals) {
    const std::uint32_t before = slots[number].received.load(std::memory_order_relaxed);
    if (!install(number))
      return fail(ErrorCode::InvalidArgument, "a handler for {}: {}", signal_name(number), errno_text(errno));
    latch.watched_.push_back({number, before});
  }
  return latch;
}

SignalLatch::SignalLatch(SignalLatch&& other) noexcept
    : watched_(std::exchange(other.watched_, {})), keeps_handlers_(other.keeps_handlers_) {}

SignalLatch::~SignalLatch() {
  if (keeps_handlers_) return;
  for (const Watched& watched : watched_) uninstall(watched.number);
}

int SignalLatch::received() const noexcept {
  for (const Watched& watched : watched_) {
    if (slots[watched.number].received.load(std::memory_order_relaxed) != watched.before) return watched.number;
  }
  return 0;
}

}  // namespace cohort::sys
