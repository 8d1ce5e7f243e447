// A connection of two ranks that is not agreed on yet. Of the one that opens it: connects, proves itself and its peer
// (net/secure_connection.h), says what the connection is for, hears whether it may, and confirms. Of the other, whose
// net::Acceptor has done the first half: waits to hear that. Then it gives its socket away. Owns the socket until then.
// Not thread-safe: the transport's mutex guards it.
#pragma once

#include "net/address.h"
#include "net/secure_connection.h"
#include "sys/unique_fd.h"
#include "transport/tcp/wire.h"

#include <chrono>
#include <memory>
#include <string>

namespace cohort::transport::tcp {

class Attempt {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    Going,     ///< goes on when the socket is ready
    Agreed,    ///< `detach` it
    UseOther,  ///< the peer has a connection of its own under way
    Failed,    ///< see `why`
  };

  /// Begins to connect to a numeric address. `secret` is the world's.
  static Attempt open(const net::Secret& secret, const Hello& hello, const net::Address& address);
  /// Of one that was accepted, and that is welcome.
  static Attempt accept(net::SecureConnection connection, const Hello& hello);

  Attempt(Attempt&&) = default;
  Attempt& operator=(Attempt&&) = delete;
  ~Attempt();

  State advance();
  State state() const noexcept { return state_; }
  /// For epoll.
  std::uint32_t events() const noexcept;
  int fd() const noexcept { return connection_ ? connection_->fd() : socket_.get(); }
  int peer() const noexcept { return peer_; }
  int lane() const noexcept { return lane_; }
  bool opens() const noexcept { return opens_; }
  /// It opens a connection, and its peer may hear of it.
  bool greeted() const noexcept { return opens_ && connection_ != nullptr; }
  bool refused() const noexcept { return refused_; }  ///< nobody listens there
  const std::string& why() const noexcept { return why_; }
  Clock::time_point begun() const noexcept { return begun_; }
  /// Its peer is there and is the right one; it may be busy.
  bool proven() const noexcept { return connection_ && connection_->established(); }
  /// It has taken too long. Look first at what has come.
  bool late(Clock::time_point now) const noexcept {
    return now - begun_ > (proven() ? kBusy : kSilent) * (opens_ ? 1 : 2);
  }
  /// Once agreed.
  Result<net::SecureConnection::Detached> detach(Protection protection);

 private:
  // Who has welcomed a peer waits twice as long as that peer would still confirm: it may be sending already.
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
  sys::UniqueFd socket_;                               // until it is connected
  std::unique_ptr<net::SecureConnection> connection_;  // from then on
  State state_ = State::Going;
  bool refused_ = false;
  std::string why_;
  Clock::time_point begun_ = Clock::now();
};

}  // namespace cohort::transport::tcp
