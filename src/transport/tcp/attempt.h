// A connection that has not been proven yet: connects or has been accepted, goes through the handshake of wire.h, and
// then gives its socket away. Owns the socket until then. Not thread-safe: the transport's mutex guards it.
#pragma once

#include "net/address.h"
#include "net/door.h"
#include "sys/unique_fd.h"
#include "transport/tcp/wire.h"

#include <chrono>
#include <functional>
#include <string>

namespace cohort::transport::tcp {

class Attempt {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    Going,     ///< goes on when the socket is ready
    Proven,    ///< the peer has proved itself: take the socket
    UseOther,  ///< the peer has a connection of its own under way
    Failed,    ///< see `why`
  };

  /// Begins to connect to a numeric address.
  static Attempt open(const WorldKey& key, int own, int peer, int lane, const net::Address& address);
  /// Of an accepted socket; who it is shows in its first bytes.
  static Attempt accept(const WorldKey& key, int own, int size, net::Door::Visitor visitor);

  Attempt(Attempt&&) = default;
  Attempt& operator=(Attempt&&) = delete;
  ~Attempt();

  enum class Verdict { Welcome, UseMine, Unknown };
  /// Whether a peer that connects may, or should use the connection that this rank opens. The hello's numbers are in
  /// range and its proof is right.
  using Welcome = std::function<Verdict(const Hello& hello)>;
  State advance(const Welcome& welcome);
  State state() const noexcept { return state_; }
  /// For epoll.
  std::uint32_t events() const noexcept;
  int fd() const noexcept { return socket_.get(); }
  int peer() const noexcept { return peer_; }  ///< -1: not known yet
  int lane() const noexcept { return lane_; }
  bool opens() const noexcept { return opens_; }
  /// It opens a connection, and its peer may have seen its hello.
  bool greeted() const noexcept { return opens_ && connected_; }
  bool refused() const noexcept { return refused_; }  ///< nobody listens there
  const std::string& why() const noexcept { return why_; }
  Clock::time_point begun() const noexcept { return begun_; }
  const net::Source& source() const noexcept { return source_; }  ///< of one that was accepted
  /// Of one that was accepted: it has said something that only a peer can say, and has not said before.
  bool credible() const noexcept { return credible_; }
  /// Once proven, of this connection alone.
  net::Mac key() const { return session_key(*key_, hello_, answer_); }
  sys::UniqueFd take() noexcept;

 private:
  Attempt(const WorldKey& key, int own, int size, bool opens) : key_(&key), own_(own), size_(size), opens_(opens) {}
  void own_socket(sys::UniqueFd socket);
  State fail_with(std::string why);
  bool send_all(const void* data, std::size_t bytes);
  /// True once `bytes` bytes are in `buffer_`.
  bool read_up_to(std::size_t bytes);
  State advance_opening();
  State advance_accepted(const Welcome& welcome);

  const WorldKey* key_;
  int own_;
  int size_;
  bool opens_;
  int peer_ = -1;
  int lane_ = 0;
  net::Address address_;
  sys::UniqueFd socket_;
  net::Source source_;
  State state_ = State::Going;
  bool connected_ = false;
  bool answered_ = false;
  bool refused_ = false;
  bool credible_ = false;
  Hello hello_;
  Answer answer_;
  std::string buffer_;
  std::string why_;
  Clock::time_point begun_ = Clock::now();
};

}  // namespace cohort::transport::tcp
