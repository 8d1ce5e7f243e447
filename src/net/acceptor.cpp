#include "net/acceptor.h"

#include "net/socket.h"
#include "sys/unique_fd.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace cohort::net {
namespace {

// What an event is about: the upper half says of which kind, the lower which.
constexpr std::uint64_t kOfListener = std::uint64_t{1} << 32;
constexpr std::uint64_t kOfPending = std::uint64_t{2} << 32;
constexpr std::uint64_t kOfClock = std::uint64_t{3} << 32;
constexpr int kAtOnce = 64;  // connections taken before those that wait have their turn

}  // namespace

Acceptor::Acceptor(std::vector<sys::UniqueFd> listeners, Options options)
    : options_(std::move(options)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      clock_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  options_.secure.heard = &heard_;
  for (sys::UniqueFd& listener : listeners) {
    const int fd = listener.get();
    entrances_.push_back({std::move(listener), RateLimiter(fd), {}});
    sys::close_on_fork(fd);
  }
  // A forked child would keep what is in the set alive in it.
  if (epoll_) sys::close_on_fork(epoll_.get());
  bool good = epoll_ && clock_ && watch(clock_.get(), EPOLLIN, kOfClock, true);
  for (std::size_t i = 0; i < entrances_.size() && good; ++i)
    good = watch(entrances_[i].listener.get(), EPOLLIN, kOfListener | i, true);
  if (!good) raise(ErrorCode::Unavailable, "no descriptor left to watch a port: {}", errno_text(errno));
}

Acceptor::~Acceptor() {
  for (const Entrance& each : entrances_) sys::forget_on_fork(each.listener.get());
  for (const auto& [number, pending] : waiting_) sys::forget_on_fork(pending.connection.fd());
  sys::forget_on_fork(epoll_.get());
}

bool Acceptor::watch(int fd, std::uint32_t events, std::uint64_t what, bool is_new) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = what;
  return ::epoll_ctl(epoll_.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) == 0;
}

std::optional<Acceptor::Accepted> Acceptor::next() {
  if (accepted_.empty()) turn();
  if (accepted_.empty()) return std::nullopt;
  Accepted first = std::move(accepted_.front());
  accepted_.pop_front();
  return first;
}

void Acceptor::judge(const Source& source, bool proof) {
  if (!options_.public_secret) return;
  for (Entrance& each : entrances_) {
    if (proof)
      each.limiter.record_success(source);
    else
      each.limiter.record_failure(source);
  }
}

void Acceptor::turn() {
  std::array<epoll_event, 64> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < ready; ++i) {
    const std::uint64_t what = events[static_cast<std::size_t>(i)].data.u64;
    const auto which = static_cast<std::uint32_t>(what);
    switch (what - which) {
      case kOfListener: accept_all(entrances_[which], which); break;
      case kOfPending:
        if (const auto at = waiting_.find(which); at != waiting_.end()) advance(at);
        break;
      default: look_at_clock();
    }
  }
  arm();
}

void Acceptor::accept_all(Entrance& entrance, std::uint32_t which) {
  for (int i = 0; i < kAtOnce; ++i) {
    auto incoming = entrance.limiter.next();
    if (!incoming) break;
    take(*std::move(incoming));
  }
  entrance.paused_until = entrance.limiter.paused_until();
  if (entrance.paused_until) watch(entrance.listener.get(), 0, kOfListener | which, false);
}

void Acceptor::take(RateLimiter::PendingConnection incoming) {
  auto connection =
      options_.secret
          ? SecureConnection::with_secret(std::move(incoming.socket), Role::Server, *options_.secret, options_.secure)
          : SecureConnection::same_user(std::move(incoming.socket), Role::Server, options_.secure);
  if (!connection) {
    for (Entrance& each : entrances_) each.limiter.record_failure(incoming.source);
    if (options_.on_refused) options_.on_refused({"somebody", connection.error(), false});
    return;
  }
  const std::uint32_t number = ++last_;
  const auto at =
      waiting_.emplace(number, Pending{*std::move(connection), incoming.source, Clock::now() + options_.patience})
          .first;
  const int fd = at->second.connection.fd();
  sys::close_on_fork(fd);
  if (!watch(fd, EPOLLIN, kOfPending | number, true)) return refuse(at, Error(ErrorCode::Io, errno_text(errno)));
  advance(at);  // often it has spoken already
  if (waiting_.size() <= options_.most_pending) return;
  const auto last = pick_eviction(waiting_, [](const auto& each) { return each.second.connection.credible(); });
  refuse(last, Error(ErrorCode::Timeout, fmt::format("{} did not prove the secret before too many others came",
                                                     last->second.connection.peer())));
}

void Acceptor::advance(Waiting::iterator at) {
  Pending& pending = at->second;
  const auto moved = pending.connection.advance();
  if (!pending.proven && !options_.public_secret && pending.connection.established()) {
    pending.proven = true;
    for (Entrance& each : entrances_) each.limiter.record_success(pending.source);
  }
  if (auto first = pending.connection.next_message()) {
    const Source source = pending.source;
    accepted_.push_back({give_away(at), *std::move(first), source});
    return;
  }
  if (!moved) return refuse(at, moved.error());
  // Of all addresses that are offered a client tries several, and goes from the others once one has answered.
  if (pending.connection.at_end()) return refuse(at, Error(ErrorCode::Unavailable, "it went without a word"));
  const bool writes = pending.connection.wants_write();
  if (writes == pending.writes) return;
  pending.writes = writes;
  watch(pending.connection.fd(), writes ? EPOLLIN | EPOLLOUT : EPOLLIN, kOfPending | at->first, false);
}

void Acceptor::refuse(Waiting::iterator at, const Error& why) {
  const Pending pending = std::move(at->second);
  waiting_.erase(at);
  sys::forget_on_fork(pending.connection.fd());
  if (!pending.proven) {
    for (Entrance& each : entrances_) each.limiter.record_failure(pending.source);
  }
  if (options_.on_refused) options_.on_refused({pending.connection.peer(), why, pending.proven});
}

SecureConnection Acceptor::give_away(Waiting::iterator at) {
  SecureConnection connection = std::move(at->second.connection);
  waiting_.erase(at);
  sys::forget_on_fork(connection.fd());
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd(), nullptr);
  return connection;
}

void Acceptor::look_at_clock() {
  std::uint64_t times = 0;
  static_cast<void>(!::read(clock_.get(), &times, sizeof times));
  armed_ = Clock::time_point::max();
  const auto now = Clock::now();
  // All have the same time.
  while (!waiting_.empty() && waiting_.begin()->second.until <= now) {
    refuse(waiting_.begin(), Error(ErrorCode::Timeout, fmt::format("{} did not prove the secret in time",
                                                                   waiting_.begin()->second.connection.peer())));
  }
  for (std::size_t i = 0; i < entrances_.size(); ++i) {
    Entrance& each = entrances_[i];
    if (!each.paused_until || *each.paused_until > now) continue;
    each.paused_until.reset();
    watch(each.listener.get(), EPOLLIN, kOfListener | i, false);
  }
}

/// For the next point in time at which there is something to do.
void Acceptor::arm() {
  Clock::time_point wake = waiting_.empty() ? Clock::time_point::max() : waiting_.begin()->second.until;
  for (const Entrance& each : entrances_) {
    if (each.paused_until) wake = std::min(wake, *each.paused_until);
  }
  // One that is too early does no harm.
  if (wake >= armed_) return;
  armed_ = wake;
  const auto since = std::chrono::nanoseconds(wake.time_since_epoch()).count() + 1;
  itimerspec when{};
  when.it_value.tv_sec = since / 1'000'000'000;
  when.it_value.tv_nsec = since % 1'000'000'000;
  ::timerfd_settime(clock_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

}  // namespace cohort::net
