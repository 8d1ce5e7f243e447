#include "launch/supervise/stopping.h"

#include "launch/show/announcer.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <utility>

namespace cohort::launch {
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
  StopNotice notice;
  if (!announced_) notice.reason = reason_;
  notice.ranks = events_.running_ranks();
  if (notice.ranks == 0) notice.others = events_.running_others();
  notice.seconds_left = left;
  notice.next_signal = signal_ == SIGINT ? SIGTERM : SIGKILL;
  notice.at_terminal = ::isatty(0) != 0;
  events_.say(to_string(notice));
  announced_ = true;
  // A line now and then, however long the grace.
  notice_ =
      Timer(loop_, Milliseconds(static_cast<std::int64_t>(std::max(2.0, left / 5) * 1000)), [this] { announce(); });
}

}  // namespace cohort::launch
