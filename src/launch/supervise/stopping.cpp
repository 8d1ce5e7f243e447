#include "launch/supervise/stopping.h"

#include "base/process.h"
#include "base/result.h"
#include "base/signals.h"
#include "base/terminal.h"
#include "launch/messages.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

namespace cohort::launch {

Owner::Owner(Loop& loop, int pid, std::function<void()> on_gone) {
  // A process that has ended leaves its children to another, so that a pid which is in use again is noticed.
  if (::getppid() == pid) process_ = value_or_throw(sys::open_pidfd(pid));
  if (!process_ || ::getppid() != pid) {
    raise(ErrorCode::Unavailable,
          "the process that the job belongs to (pid {}) has ended or is not the one that started this command", pid);
  }
  watch_ = Watch(loop, process_.get());
  watch_.on_readable([this, on_gone = std::move(on_gone)] {
    const auto call = on_gone;  // which ends with the watch
    gone_ = true;
    watch_ = Watch();
    call();
  });
}

void remove_private_folder(const std::string& path) {
  struct stat info {};
  // Nothing that others can write into is ever removed as a whole.
  if (::lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::getuid() ||
      (info.st_mode & 077) != 0) {
    return;
  }
  std::error_code error;
  std::filesystem::remove_all(path, error);
}

InputReader::InputReader(Loop& loop, int fd, OnInput on_input)
    : fd_(fd), on_input_(std::move(on_input)), watch_(loop, fd) {
  update();
}

bool InputReader::worth_reading(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return false;
  return !(S_ISCHR(info.st_mode) && info.st_rdev == makedev(1, 3));
}

bool InputReader::may_be_given(int fd) { return worth_reading(fd) && ::isatty(fd) == 0; }

void InputReader::taken(std::uint64_t bytes) {
  under_way_ -= std::min(under_way_, bytes);
  update();
}

void InputReader::look_again() { update(); }

void InputReader::update() {
  const bool wanted = !ended_ && under_way_ < kInputWindow && (::isatty(fd_) == 0 || sys::in_foreground(fd_));
  if (wanted)
    watch_.on_readable([this] { read_some(); });
  else
    watch_.on_readable(nullptr);
}

void InputReader::read_some() {
  if (::isatty(fd_) != 0 && !sys::in_foreground(fd_)) return update();
  std::string bytes(16 * 1024, '\0');
  const ssize_t got = ::read(fd_, bytes.data(), bytes.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  ended_ = bytes.empty();
  under_way_ += bytes.size();
  // update first: the handler may destroy us.
  update();
  on_input_(std::move(bytes));
}

namespace {

using Seconds = std::chrono::duration<double>;

/// An agent has this long for what it does after everything has been killed.
constexpr auto kAgentEndLimit = std::chrono::seconds(15);

}  // namespace

Stopping::Stopping(Loop& loop, Milliseconds grace, Events events)
    : loop_(loop), grace_(grace), events_(std::move(events)) {}

void Stopping::begin(const std::string& reason, int signal, Grace grace) {
  if (reason_.empty()) reason_ = reason;
  signal_ = signal;
  saving_ = grace.saving;
  began_ = Clock::now();
  // Most jobs end at once; who has to wait is told what for.
  if (grace.usual > Milliseconds(0)) notice_ = Timer(loop_, Milliseconds(1000), [this] { announce(); });
  // Ctrl-C asks kindly, SIGTERM comes before SIGKILL. The agents' own limit is behind ours.
  escalation_ = Timer();
  const bool kindly = signal == SIGINT && grace.usual > Milliseconds(0);
  limit_ = began_ + grace.usual;
  if (kindly) escalation_ = Timer(loop_, grace.usual, [this, grace] { begin(reason_, SIGTERM, grace); });
  if (kindly) grace.usual *= 2;
  give_up_ = Timer(loop_, grace.usual + kAgentEndLimit, [this] { events_.give_up(); });
  events_.tell(signal, grace);
}

void Stopping::they_save() {
  const auto longer = began_ + std::exchange(saving_, Milliseconds(0));
  if (longer <= limit_) return;
  limit_ = longer;
  give_up_ = Timer(loop_, std::chrono::ceil<Milliseconds>(limit_ - Clock::now()) + kAgentEndLimit,
                   [this] { events_.give_up(); });
}

void Stopping::hurry() {
  // INT, then TERM, then KILL; whatever comes while they are ending by TERM is KILL.
  if (signal_ == SIGINT) return begin(reason_, SIGTERM, {grace_});
  begin(reason_, SIGKILL, {});
}

void Stopping::finish() {
  notice_ = Timer();
  escalation_ = Timer();
  give_up_ = Timer();
}

void Stopping::announce() {
  if (quiet_ || signal_ == SIGKILL) return;
  const double left = std::max(0.0, Seconds(limit_ - Clock::now()).count());
  const int ranks = events_.running_ranks();
  const std::string others = ranks == 0 ? events_.running_others() : std::string();
  const std::string who = ranks > 0         ? fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s")
                          : !others.empty() ? others
                                            : "what the ranks have started is";
  events_.say(fmt::format(
      "{}{} still running, {:.0f} s until {}{}", announced_ || reason_.empty() ? "" : reason_ + "; ", who, left,
      sys::signal_name(signal_ == SIGINT ? SIGTERM : SIGKILL), ::isatty(0) != 0 ? "; Ctrl-C again: now" : ""));
  announced_ = true;
  // A line now and then, however long the grace.
  notice_ =
      Timer(loop_, Milliseconds(static_cast<std::int64_t>(std::max(2.0, left / 5) * 1000)), [this] { announce(); });
}

}  // namespace cohort::launch
