// The transport over TCP: one connection for each pair of ranks that communicates, made at first use (or, by option,
// several connections; the tags divide data among them). The peer of a connection is authenticated (Attempt) before its
// data is parsed. Owns its sockets. Has no thread: callers of `progress` or `sleep` drive it. Any thread may call.
#pragma once

#include "base/unique_fd.h"
#include "comm/transport/tcp/link.h"
#include "comm/transport/transport.h"
#include "net/acceptor.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/secure_connection.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::transport::tcp {

// A connection of two ranks that is still being set up. The opener connects, authenticates (net/secure_connection.h),
// states the connection's purpose (Hello), reads the peer's Decision, and confirms. The accepting end takes over from
// its net::Acceptor, and waits for the confirmation. Owns the socket until `detach`. Not thread-safe: the transport's
// mutex guards it.
class Attempt {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    Going,     ///< continues when the socket is ready
    Agreed,    ///< ready to `detach`
    UseOther,  ///< the peer is making its own connection
    Failed,    ///< see `why`
  };

  /// Begins to connect to a numeric address. `secret` is the world's.
  static Attempt open(const net::Secret& secret, const Hello& hello, const net::Address& address);
  /// Takes over an accepted connection, and welcomes its opener.
  static Attempt accept(net::SecureConnection connection, const Hello& hello);

  Attempt(Attempt&&) = default;
  Attempt& operator=(Attempt&&) = delete;
  ~Attempt();

  State advance();
  State state() const noexcept { return state_; }
  /// Events to watch with epoll.
  std::uint32_t events() const noexcept;
  int fd() const noexcept { return connection_ ? connection_->fd() : socket_.get(); }
  int peer() const noexcept { return peer_; }
  int lane() const noexcept { return lane_; }
  bool opens() const noexcept { return opens_; }
  /// True if this is the opener and the peer may know of the attempt.
  bool greeted() const noexcept { return opens_ && connection_ != nullptr; }
  bool refused() const noexcept { return refused_; }  ///< no process listens at the address
  const std::string& why() const noexcept { return why_; }
  Clock::time_point begun() const noexcept { return begun_; }
  /// True if the peer has been reached and authenticated; it may still be busy.
  bool proven() const noexcept { return connection_ && connection_->established(); }
  /// True if the attempt has taken too long. Call `advance` first.
  bool late(Clock::time_point now) const noexcept {
    return now - begun_ > (proven() ? kBusy : kSilent) * (opens_ ? 1 : 2);
  }
  /// Gives up the socket, in state Agreed.
  Result<net::SecureConnection::Detached> detach(Protection protection);

 private:
  // A rank that has welcomed a peer waits twice as long as the peer may take to confirm, since the peer may send
  // already.
  static constexpr auto kSilent = std::chrono::seconds(5);
  static constexpr auto kBusy = std::chrono::seconds(30);

  Attempt(const Hello& hello, int peer, bool opens)
      : hello_(hello), peer_(peer), lane_(static_cast<int>(hello.lane)), opens_(opens) {}
  State fail_with(std::string why);
  State connected();
  void forget() noexcept;

  Hello hello_;
  int peer_;
  int lane_;
  bool opens_;
  const net::Secret* secret_ = nullptr;
  net::Address address_;
  sys::UniqueFd socket_;                               // until connected
  std::unique_ptr<net::SecureConnection> connection_;  // after connecting
  State state_ = State::Going;
  bool refused_ = false;
  std::string why_;
  Clock::time_point begun_ = Clock::now();
};

/// Sockets at which this rank listens, opened before its addresses are published.
class Listeners {
 public:
  struct Options {
    std::string host;            ///< for messages
    bool loopback_only = false;  ///< all ranks are on this machine
    Protection protection = Protection::Authenticated;
    int lanes = 1;  ///< connections for each peer, unless the peer has fewer
  };
  /// Listens at the addresses that COHORT_NETWORK allows, on ports that the system chooses. Throws Unavailable.
  explicit Listeners(const Options& options);
  ~Listeners() { close(); }
  Listeners(Listeners&&) = default;
  Listeners& operator=(Listeners&&) = delete;
  void close() noexcept;
  const PeerInfo& info() const noexcept { return info_; }
  /// Gives the sockets to the caller.
  std::vector<sys::UniqueFd> take();

 private:
  std::vector<sys::UniqueFd> sockets_;
  PeerInfo info_;
};

class TcpTransport final : public Transport {
 public:
  struct Options {
    int rank = 0;
    std::optional<net::Secret> secret;  ///< the world's secret (link.h)
    std::vector<PeerInfo> infos;        ///< by rank; all with the same protection
    /// A peer is lost if its host does not answer for this long.
    std::chrono::seconds silence = std::chrono::seconds(3);
  };
  TcpTransport(Options options, Listeners listeners, TransportEvents& events);
  ~TcpTransport() override;

  std::recursive_mutex& mutex() noexcept override { return mutex_; }
  bool authenticates_all() const noexcept override { return protection() != Protection::Least; }
  void connect(int peer) override;
  void send(Outgoing& frame) override;
  void receive(Incoming& frame) override;
  void message(int peer, std::uint32_t tag, std::string_view bytes) override;
  bool progress() override;
  void sleep(std::chrono::milliseconds longest) override;
  void wake() noexcept override;
  std::optional<std::string> lost(int peer) override;
  std::vector<int> connected() override { return peers(false); }
  std::vector<int> owing() override { return peers(true); }
  void forget(std::uint64_t operation) override;
  void end(std::string_view bytes) override;
  bool flushed() override;
  void leave() override;

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::lock_guard<std::recursive_mutex>;

  Protection protection() const noexcept { return infos_[static_cast<std::size_t>(rank_)].protection; }
  Link& open(int peer, int lane = 0);
  int lanes_to(int peer) const noexcept;
  /// Connection for frames with this tag; the same at both ends.
  int lane_of(int peer, std::uint32_t tag) const noexcept {
    return static_cast<int>((tag & 0x0FFFFFFF) % static_cast<std::uint32_t>(lanes_to(peer)));
  }
  static std::size_t index_of(int peer, int lane) noexcept {
    return static_cast<std::size_t>(peer) * kMostLanes + static_cast<std::size_t>(lane);
  }
  // An epoll event's key: the upper half is the kind, the lower half is the number within that kind.
  static constexpr std::uint64_t kOfAcceptor = std::uint64_t{1} << 32;
  static constexpr std::uint64_t kOfAttempt = std::uint64_t{2} << 32;
  static constexpr std::uint64_t kOfLink = std::uint64_t{3} << 32;
  static constexpr std::uint64_t kOfBell = std::uint64_t{4} << 32;
  static std::uint64_t key_of(const Link& link) noexcept;
  void watch(Link& link);
  void watch_fd(int fd, std::uint32_t events, std::uint64_t key, bool is_new);
  bool handle(std::uint64_t key);
  bool drive(Link& link, bool readable);
  void look_for_silence();
  std::vector<int> peers(bool owing);

  // The next functions are in tcp_connect.cpp.
  bool look_after_connecting();
  void connect_next(Link& link, Clock::time_point now);
  std::vector<net::Address> reachable(int peer) const;
  void accept_all();
  void add_attempt(Attempt attempt);
  void advance(std::uint32_t id);
  void establish(Attempt attempt);
  template <class Predicate>
  bool any_attempt(int peer, int lane, const Predicate& predicate) const {
    return std::any_of(attempts_.begin(), attempts_.end(), [&](const auto& each) {
      return each.second.peer() == peer && each.second.lane() == lane && predicate(each.second);
    });
  }
  bool is_welcome(int peer, int lane);
  void close_attempts(int peer, int lane);

  std::recursive_mutex mutex_;
  const int rank_;
  const int size_;
  const net::Secret secret_;
  const std::vector<PeerInfo> infos_;
  const std::chrono::seconds silence_;
  TransportEvents& events_;
  sys::UniqueFd epoll_;
  sys::UniqueFd bell_;                        // an eventfd
  std::vector<std::unique_ptr<Link>> links_;  // by peer and lane; made at the first use
  std::vector<Link*> open_;
  std::vector<Link*> again_;                   // links that still hold received bytes
  std::optional<net::Acceptor> acceptor_;      // until `leave`
  std::map<std::uint32_t, Attempt> attempts_;  // in order of creation
  std::uint32_t next_attempt_ = 0;
  Clock::time_point looked_{};
  Clock::time_point listened_{};
  bool connecting_ = false;  // some link is connecting
  bool ended_ = false;
  bool left_ = false;
  std::string end_bytes_;
};

}  // namespace cohort::transport::tcp
