// Admits connections to a listener once they have proved the job's secret, and bounds the cost of those that have not.
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

/// Origin of a connection: an IPv6 address, an IPv4 address mapped into IPv6, or zeros for a Unix socket.
struct Source {
  std::array<std::uint8_t, 16> bytes{};
  bool network = false;  ///< stands for all IPv6 addresses that begin with these 64 bits
  auto operator<=>(const Source&) const = default;
  bool v4() const noexcept;
  bool loopback() const noexcept;
  static Source of(const sockaddr_storage& address) noexcept;
  Source network_of() const noexcept;
};

/// Picks the waiting connection to close. `waiting` is in order of arrival, and not empty. Picks the first connection
/// that is not `credible`, else the first of all, since a peer that has the secret proves it within moments. The
/// newest, which may not have been read yet, is picked only if it is the only one.
template <class Waiting, class Credible>
auto pick_eviction(Waiting& waiting, Credible credible) {
  const auto newest = std::prev(waiting.end());
  const auto worthless = std::find_if(waiting.begin(), newest, [&](const auto& each) { return !credible(each); });
  return worthless != newest ? worthless : waiting.begin();
}

// Bounds the cost of unauthenticated connections to a TCP listener. A token bucket (burst 5000, 50 a second) limits
// connections that fail to prove the job's secret; for a while the kernel drops packets of sources that fail
// repeatedly. Without free descriptors, the limiter pauses instead of spinning. Addresses from which a peer has proved
// the secret are never dropped, and loopback is not limited. Does not own the listener: call `close` before the
// listener is closed. One thread at a time.
class RateLimiter {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    int burst = 5000;                           ///< most unauthenticated connections in a row
    int per_second = 50;                        ///< unauthenticated connections a second in the long run
    int failures_to_block = 64;                 ///< failures of one source within `memory` that block the source
    std::chrono::milliseconds blocked{10'000};  ///< time for which a source is blocked
    std::chrono::milliseconds memory{10'000};
    std::chrono::milliseconds pause{100};  ///< between checks of the listener while the limit is exceeded
  };
  struct PendingConnection {
    sys::UniqueFd socket;
    Source source;
  };

  explicit RateLimiter(int listener) : RateLimiter(listener, Limits()) {}
  RateLimiter(int listener, const Limits& limits);

  /// Returns the next connection; nullopt if there is none, or none should be taken before `paused_until`. For each
  /// connection taken, call `record_success` or `record_failure`.
  std::optional<PendingConnection> next(Clock::time_point now = Clock::now());
  /// Records that the peer has proved the secret.
  void record_success(const Source& source);
  /// Records that the peer has failed, or has taken too long.
  void record_failure(const Source& source, Clock::time_point now = Clock::now());

  /// Stops using the listener.
  void close() noexcept { listener_ = -1; }

  /// Returns the time until which the listener need not be watched, although it may be readable.
  std::optional<Clock::time_point> paused_until(Clock::time_point now = Clock::now()) const noexcept;
  /// Number of addresses or networks that the kernel blocks at present.
  std::size_t blocked() const noexcept { return blocked_.size(); }

 private:
  void refill(Clock::time_point now);
  /// Returns the source under which failures of `source` are counted. An IPv6 address is counted as its /64 network,
  /// since one host may have any number of addresses there. It is counted as itself if this host is in that network or
  /// a peer has proved the secret from there, since other hosts of the job may then be in the network too.
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
  std::set<Source> shared_;  ///< networks that contain this host, or from which a peer has proved the secret
  std::set<Source> blocked_;
};

// Accepts connections at the listeners of one service, and hands over each connection whose peer has proved itself and
// sent its first message. Until then connections are limited in number and time, and a RateLimiter bounds their cost.
// Owns its listeners and the connections not yet handed over. Has no thread: `fd` is an epoll descriptor that is
// readable whenever `next` has something to do, deadlines included. One thread at a time.
class Acceptor {
 public:
  /// A connection that was closed: its peer, the reason, and whether the peer had proved itself.
  struct Refusal {
    std::string peer;
    Error why;
    bool proven = false;
  };
  struct Options {
    std::optional<Secret> secret = {};  ///< without a secret (Unix names only), this user's processes are admitted
    SecureOptions secure = {};          ///< the acceptor sets `heard` to its own filter
    /// True if the secret is public. Then it only keeps unrelated connections apart, and only `judge` proves a peer.
    bool public_secret = false;
    std::size_t most_pending = 128;  ///< if exceeded, the connection that `pick_eviction` picks is closed
    std::chrono::milliseconds patience = std::chrono::seconds(5);
    std::function<void(const Refusal&)> on_refused = {};
  };
  struct Accepted {
    SecureConnection connection;
    std::string first;  ///< first message
    Source source;
  };

  /// Throws Unavailable if the system has no descriptor left.
  Acceptor(std::vector<sys::UniqueFd> listeners, Options options);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int fd() const noexcept { return epoll_.get(); }
  void set_most_pending(std::size_t most) noexcept { options_.most_pending = most; }
  /// Does what can be done without blocking, and returns an accepted connection. Call until it returns nullopt.
  std::optional<Accepted> next();
  /// With a public secret, records whether the first message of an accepted connection was a proof; else does nothing.
  void judge(const Source& source, bool proof);

 private:
  using Clock = std::chrono::steady_clock;
  struct Entrance {
    sys::UniqueFd listener;
    RateLimiter limiter;
    std::optional<Clock::time_point> paused_until;  ///< the listener is not watched until then
  };
  struct Pending {
    SecureConnection connection;
    Source source;
    Clock::time_point until;
    bool proven = false;
    bool writes = false;  ///< the socket is watched for writing too
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
  Waiting waiting_;  ///< in order of arrival
  std::uint32_t last_ = 0;
  std::deque<Accepted> accepted_;
};

}  // namespace cohort::net
