// Admits connections at a listener that have proved the job's secret, and bounds the cost of those that have not.
#pragma once

#include "base/unique_fd.h"
#include "net/secure_connection.h"
#include "net/tls.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

struct sockaddr_storage;

namespace cohort::net {

/// Origin of a connection: an IPv6 address, an IPv4 one (mapped into IPv6), or, over a Unix socket, nothing.
struct Source {
  std::array<std::uint8_t, 16> bytes{};
  bool network = false;  ///< all IPv6 addresses that begin with these 64 bits
  auto operator<=>(const Source&) const = default;
  bool v4() const noexcept;
  bool loopback() const noexcept;
  static Source of(const sockaddr_storage& address) noexcept;
  Source network_of() const noexcept;
};

/// Picks the waiting connection to close; `waiting` is in the order in which they came, and not empty. The first that
/// has not said anything `credible`, else the first: a peer that has the secret is done within moments. Never the
/// newest, which may not have been read yet, before another.
template <class Waiting, class Credible>
auto pick_eviction(Waiting& waiting, Credible credible) {
  const auto newest = std::prev(waiting.end());
  const auto worthless = std::find_if(waiting.begin(), newest, [&](const auto& each) { return !credible(each); });
  return worthless != newest ? worthless : waiting.begin();
}

// Bounds what unauthenticated connections to a TCP listener cost: a token bucket (burst 5000, 50 a second) for those
// that fail to prove the job's secret; the kernel drops packets of sources that fail again and again for a while.
// Without free descriptors it waits instead of spinning. Addresses from which a peer has proved the secret are never
// dropped, and loopback is not limited. Does not own the listener: `close` before that is closed. One thread at a time.
class RateLimiter {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    int burst = 5000;                           ///< strangers in a row,
    int per_second = 50;                        ///< and so many a second in the long run
    int failures_to_block = 64;                 ///< failures of one source in `memory`, from which it is shut out,
    std::chrono::milliseconds blocked{10'000};  ///< for so long
    std::chrono::milliseconds memory{10'000};
    std::chrono::milliseconds pause{100};  ///< between looks, while too many have come
  };
  struct PendingConnection {
    sys::UniqueFd socket;
    Source source;
  };

  explicit RateLimiter(int listener) : RateLimiter(listener, Limits()) {}
  RateLimiter(int listener, const Limits& limits);

  /// The next connection. Nullopt: there is none, or none should be taken before `paused_until`. Each one that is taken
  /// is to be followed by one of the two below.
  std::optional<PendingConnection> next(Clock::time_point now = Clock::now());
  /// The peer has proved itself.
  void record_success(const Source& source);
  /// The peer has failed, or has taken too long.
  void record_failure(const Source& source, Clock::time_point now = Clock::now());

  /// The listener is not touched any more.
  void close() noexcept { listener_ = -1; }

  /// Time until which the listener is not worth watching, although it may be readable.
  std::optional<Clock::time_point> paused_until(Clock::time_point now = Clock::now()) const noexcept;
  /// Addresses, or networks of many, that the kernel does not answer at present.
  std::size_t blocked() const noexcept { return blocked_.size(); }

 private:
  void refill(Clock::time_point now);
  /// Source as which `source` is counted: its IPv6 network, where one host has as many addresses as it likes. If this
  /// host is in it, or a peer has come from it, others of the job live there too: then each address for itself.
  Source counted(const Source& source) const;
  bool is_blocked(const Source& source) const;
  void block_the_worst(Clock::time_point now);
  bool update_kernel_filter();

  int listener_;
  const Limits limits_;
  double tokens_;
  Clock::time_point refilled_{};
  Clock::time_point paused_until_{};
  Clock::time_point remembered_since_{};
  Clock::time_point blocked_until_{};
  Clock::time_point complained_{};
  std::map<Source, int> failures_;
  std::set<Source> proven_;
  std::set<Source> shared_;  ///< networks in which this host is or from which a peer has come
  std::set<Source> blocked_;
};

// Takes connections in at listeners, all of one service, and gives away those whose other end has proved itself and
// said its first message. Until then they are few, have a deadline, and cost as little as a RateLimiter lets them. Owns
// its listeners and the connections that it has not given away. Has no thread: `fd` is an epoll descriptor that is
// readable whenever `next` has something to do, deadlines included. One thread at a time.
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
  /// Reports, with a public secret, whether the first message of an accepted connection was a proof.
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
