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

Owner::Owner(Loop& loop, int pid) {
  // A process that has ended leaves its children to another parent, so this check notices a pid that was reused.
  if (::getppid() == pid) process_ = value_or_throw(sys::open_pidfd(pid));
  if (!process_ || ::getppid() != pid) {
    raise(ErrorCode::Unavailable,
          "the process that the job belongs to (pid {}) has ended or is not the one that started this command", pid);
  }
  watch_ = Watch(loop, process_.get());
  watch_.on_readable([this] {
    gone_ = news_ = true;
    watch_ = Watch();
  });
}

void remove_private_folder(const std::string& path) {
  struct stat info {};
  // A folder that others can write into is never removed with its contents.
  if (::lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::getuid() ||
      (info.st_mode & 077) != 0) {
    return;
  }
  std::error_code error;
  std::filesystem::remove_all(path, error);
}

InputReader::InputReader(Loop& loop, int fd, AgentHandle& agent) : fd_(fd), agent_(agent), watch_(loop, fd) {
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
  std::string bytes(std::size_t{16} << 10, '\0');
  const ssize_t got = ::read(fd_, bytes.data(), bytes.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  ended_ = bytes.empty();
  under_way_ += bytes.size();
  update();
  agent_.channel->send(Input{std::move(bytes)});
}

namespace {

using Seconds = std::chrono::duration<double>;

/// Time for an agent's own work after everything has been killed.
constexpr auto kAgentEndLimit = std::chrono::seconds(15);

}  // namespace

Stopping::Order Stopping::begin(const std::string& reason, int signal, Grace grace, Clock::time_point now) {
  if (reason_.empty()) reason_ = reason;
  signal_ = signal;
  saving_ = grace.saving;
  began_ = now;
  // Most jobs end quickly. A user who has to wait gets a notice that says why.
  if (grace.usual > Milliseconds(0)) notice_at_ = now + Milliseconds(1000);
  // After Ctrl-C's SIGINT, SIGTERM comes before SIGKILL. The agents' own limit is later than ours.
  harder_at_.reset();
  limit_ = now + grace.usual;
  if (signal == SIGINT && grace.usual > Milliseconds(0)) {
    harder_at_ = limit_;
    harder_ = grace;
    grace.usual *= 2;
  }
  give_up_at_ = now + grace.usual + kAgentEndLimit;
  return {signal, grace};
}

void Stopping::they_save(Clock::time_point now) {
  const auto longer = began_ + std::exchange(saving_, Milliseconds(0));
  if (longer <= limit_) return;
  limit_ = longer;
  give_up_at_ = std::max(limit_, now) + kAgentEndLimit;
}

Stopping::Order Stopping::hurry(Clock::time_point now) {
  // SIGINT, then SIGTERM, then SIGKILL; a further request after SIGTERM sends SIGKILL.
  return signal_ == SIGINT ? begin(reason_, SIGTERM, {grace_}, now) : begin(reason_, SIGKILL, {}, now);
}

std::optional<Stopping::Clock::time_point> Stopping::next_look() const {
  std::optional<Clock::time_point> next;
  for (const auto& at : {notice_at_, harder_at_, give_up_at_}) {
    if (at && (!next || *at < *next)) next = at;
  }
  return next;
}

Stopping::Due Stopping::look(Clock::time_point now) {
  const auto over = [now](std::optional<Clock::time_point>& at) {
    if (!at || now < *at) return false;
    at.reset();
    return true;
  };
  Due due;
  due.notice = over(notice_at_) && !quiet_ && signal_ != SIGKILL;
  due.give_up = over(give_up_at_);
  if (over(harder_at_)) due.order = begin(reason_, SIGTERM, harder_, now);
  return due;
}

std::string Stopping::notice(int ranks, const std::string& others, Clock::time_point now) {
  const double left = std::max(0.0, Seconds(limit_ - now).count());
  const std::string who = ranks > 0         ? fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s")
                          : !others.empty() ? others
                                            : "what the ranks have started is";
  std::string text = fmt::format(
      "{}{} still running, {:.0f} s until {}{}", announced_ || reason_.empty() ? "" : reason_ + "; ", who, left,
      sys::signal_name(signal_ == SIGINT ? SIGTERM : SIGKILL), ::isatty(0) != 0 ? "; Ctrl-C again: now" : "");
  announced_ = true;
  // Repeats the notice now and then, however long the grace is.
  notice_at_ = now + Milliseconds(static_cast<std::int64_t>(std::max(2.0, left / 5) * 1000));
  return text;
}

void StopOrders::begin(const std::string& reason, int signal, Stopping::Grace grace, int status) {
  status_ = status;
  tell(stopping_.begin(reason, signal, grace, Stopping::Clock::now()));
  if (members_.somebody_saves()) they_save();
}

void StopOrders::ask(Role role, Stopping::Milliseconds grace) {
  if (role == Role::Worker) workers_asked_ = true;
  asked_ = std::max(asked_, role);
  tell(stopping_.begin({}, SIGTERM, {grace}, Stopping::Clock::now()));
}

void StopOrders::they_save() {
  stopping_.they_save(Stopping::Clock::now());
  wait();
}

void StopOrders::hurry() { tell(stopping_.hurry(Stopping::Clock::now())); }

void StopOrders::finish() {
  stopping_.finish();
  next_ = Timer();
}

void StopOrders::wait() {
  const auto next = stopping_.next_look();
  next_ = next ? Timer(loop_, *next - Stopping::Clock::now(), [this] { look(); }) : Timer();
}

void StopOrders::look() {
  const auto now = Stopping::Clock::now();
  const Stopping::Due due = stopping_.look(now);
  if (due.notice) run_.say(stopping_.notice(members_.running_ranks(), members_.running_others(), now));
  given_up_ = due.give_up;
  if (due.order) return tell(*due.order);
  wait();
}

void StopOrders::tell(const Stopping::Order& order) {
  const Role role = members_.running_role();
  asked_ = std::max(asked_, role);
  for (const auto& agent : agents_.members()) {
    if (agent->channel == nullptr) {
      AgentPool::kill(*agent);  // the agent runs nothing
    } else if (!agent->started) {
      agent->channel->send(Finish{status_});
    }
  }
  agents_.broadcast(StopWorkers{order.signal, static_cast<std::uint32_t>(order.grace.usual.count()),
                                static_cast<std::uint32_t>(order.grace.saving.count()), role},
                    [](const AgentHandle& agent) { return agent.started; });
  wait();
}

}  // namespace cohort::launch
