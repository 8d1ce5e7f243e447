// A stream of messages between two processes that have proved to each other that they belong together: TLS 1.3 with
// the job's secret as pre-shared key and a fresh Diffie-Hellman exchange (no certificates, no resumption), or, on one
// host without a secret, a Unix socket whose other end the kernel says runs as the same user.
// Owns its socket. One thread at a time. Never raises SIGPIPE. After an error it is dead: destroy it.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/tls.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::net {

enum class Role { Client, Server };

struct SecureOptions {
  /// Both ends have to give the same. Keys differ by purpose, so a peer of one service cannot be redirected to another.
  std::string purpose = "store";
  /// Longer messages are refused on both ends; memory for one grows with what has arrived, not with what was announced.
  std::size_t longest_message = (std::size_t{64} << 20) + (std::size_t{64} << 10);
  /// Filter of a listener's server ends: replayed ClientHellos fail. Has to outlive their handshakes.
  ReplayFilter* heard = nullptr;
  /// The socket can be given away: nothing is read beyond the record that ends a message, and TLS's good-bye is not
  /// said.
  bool detachable = false;
  /// Takes descriptors that come over a Unix socket: `take_descriptor`. Otherwise the system closes them.
  bool descriptors = false;
};

/// Called by an end without the secret, where one is needed: the server there, or one that begins until the deadline,
/// reports that to its user. Nothing is received.
void tell_of_no_secret(const Address& server, Deadline deadline) noexcept;

class SecureConnection {
 public:
  /// Does no I/O yet. `socket` is a connected, non-blocking stream socket.
  static Result<SecureConnection> with_secret(sys::UniqueFd socket, Role role, const Secret& secret,
                                              const SecureOptions& options = {});
  /// Refuses (InvalidArgument, says how to give a secret) a Unix socket whose other end is another user's.
  static Result<SecureConnection> same_user(sys::UniqueFd socket, Role role, const SecureOptions& options = {});

  SecureConnection(SecureConnection&&) noexcept;
  SecureConnection& operator=(SecureConnection&&) noexcept;
  ~SecureConnection();

  int fd() const noexcept;
  /// True once the other end has proved itself. Before that not a byte of its messages is parsed.
  bool established() const noexcept;
  /// True if what the other end has said so far was made with the secret and, with `SecureOptions::heard`, not said
  /// before. For a server that has to close some before they have come to the end of their handshake.
  bool credible() const noexcept;
  /// The other end, for messages.
  const std::string& peer() const noexcept;

  // Event-driven use, with level-triggered poll or epoll: watch POLLIN, and POLLOUT while `wants_write()`; call
  // `advance()` when either shows; then take all messages. To push back, stop watching POLLIN.

  /// Goes on with the handshake, sends and receives what is possible at once (at most about 256 KiB of input a call).
  /// Errors: InvalidArgument "authentication failed: ..." (the secrets differ), Corrupt (bad framing), PeerLost
  /// (reset), Unavailable (the other end went away before the handshake was over).
  Result<void> advance();
  bool wants_write() const noexcept;
  /// A complete message, in order; nullopt if none is there.
  std::optional<std::string> next_message();
  /// Takes a message over for sending, also before the handshake is over. Sends what is possible at once.
  Result<void> queue(std::string_view message);
  /// The same over a Unix socket, with a descriptor that is there at the other end when the message is.
  Result<void> queue(std::string_view message, sys::UniqueFd descriptor);
  /// The last descriptor that has come and not been taken; none if there is none.
  sys::UniqueFd take_descriptor() noexcept;
  std::size_t unsent_bytes() const noexcept;
  /// The other end has closed its side in good order and all messages have been taken.
  bool at_end() const noexcept;

  /// State left when two ends that have proved each other go on in their own way.
  struct Detached {
    sys::UniqueFd socket;
    std::array<std::uint8_t, 32> key{};  ///< of this connection alone (RFC 8446, section 7.5)
    std::unique_ptr<TlsStream> stream;   ///< the encryption, if it is to stay
  };
  enum class Encryption { Ends, Stays };
  /// Called with `detachable`, and a secret: once all that both ends have to say in messages is said, and taken.
  /// Corrupt if there is more. This end is dead then.
  Result<Detached> detach(Encryption encryption);

  // Blocking use. Timeout when the deadline passes; the connection is then as good as before.

  Result<void> handshake(Deadline deadline);
  /// Returns once the system has taken the whole message.
  Result<void> send(std::string_view message, Deadline deadline);
  /// PeerLost when the other end has closed.
  Result<std::string> receive(Deadline deadline);

 private:
  struct Impl;
  explicit SecureConnection(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// Finds the one among several addresses where the right peer listens: all are tried at once, and only a peer that
// proves the secret counts, so that an address which means somebody else here (a docker bridge, a tunnel) has no
// effect. Blocks until the deadline at most; any thread.

/// Addresses are numeric. Fails with PeerLost where somebody has answered and closed before it had proved itself (a
/// full server: it may be worth another try), else with Unavailable, or Timeout; names what became of each address.
Result<SecureConnection> reach(std::span<const Endpoint> endpoints, const Secret& secret, const SecureOptions& options,
                               Deadline deadline);

}  // namespace cohort::net
