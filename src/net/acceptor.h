// Takes connections in at listeners, all of one service, and gives away those whose other end has proved itself and
// said its first message. Until then they are few, have a deadline, and cost as little as a RateLimiter lets them. Owns
// its listeners and the connections that it has not given away. Has no thread: `fd` is an epoll descriptor that is
// readable whenever `next` has something to do, deadlines included. One thread at a time.
#pragma once

#include "net/rate_limiter.h"
#include "net/replay_filter.h"
#include "net/secure_connection.h"
#include "sys/unique_fd.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::net {

class Acceptor {
 public:
  /// A connection that was closed: whose, why, and whether it had proved itself.
  struct Refusal {
    std::string peer;
    Error why;
    bool proven = false;
  };
  struct Options {
    std::optional<Secret> secret = {};  ///< without one, for Unix names only: this user's processes
    SecureOptions secure = {};          ///< `heard` is the acceptor's own
    /// Anybody can make it: it keeps others' connections apart, and proves nothing before `judge`.
    bool public_secret = false;
    std::size_t most_pending = 128;  ///< of more, `pick_eviction` says which goes
    std::chrono::milliseconds patience = std::chrono::seconds(5);
    std::function<void(const Refusal&)> on_refused = {};
  };
  struct Accepted {
    SecureConnection connection;
    std::string first;  ///< message
    Source source;
  };

  /// Throws Unavailable if the system has no descriptor left.
  Acceptor(std::vector<sys::UniqueFd> listeners, Options options);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int fd() const noexcept { return epoll_.get(); }
  void set_most_pending(std::size_t most) noexcept { options_.most_pending = most; }
  /// Does what can be done at once. Call it until it has none.
  std::optional<Accepted> next();
  /// With a public secret: whether the first message of one that came was a proof.
  void judge(const Source& source, bool proof);

 private:
  using Clock = std::chrono::steady_clock;
  struct Entrance {
    sys::UniqueFd listener;
    RateLimiter limiter;
    std::optional<Clock::time_point> paused_until;  ///< it is not watched
  };
  struct Pending {
    SecureConnection connection;
    Source source;
    Clock::time_point until;
    bool proven = false;
    bool writes = false;  ///< watched for that too
  };
  using Waiting = std::map<std::uint32_t, Pending>;

  void turn();
  void accept_all(Entrance& entrance, std::uint32_t which);
  void take(RateLimiter::PendingConnection incoming);
  void advance(Waiting::iterator at);
  void refuse(Waiting::iterator at, const Error& why);
  SecureConnection give_away(Waiting::iterator at);
  bool watch(int fd, std::uint32_t events, std::uint64_t what, bool is_new);
  void look_at_clock();
  void arm();

  Options options_;
  ReplayFilter heard_;
  sys::UniqueFd epoll_;
  sys::UniqueFd clock_;  ///< a timerfd
  Clock::time_point armed_ = Clock::time_point::max();
  std::vector<Entrance> entrances_;
  Waiting waiting_;  ///< the first that came is in front
  std::uint32_t last_ = 0;
  std::deque<Accepted> accepted_;
};

}  // namespace cohort::net
