// A stream of messages between two processes that have authenticated each other: by TLS 1.3 with the job's secret as
// pre-shared key and a fresh Diffie-Hellman exchange (no certificates, no resumption); or, on one host without a
// secret, by a Unix socket whose other end, according to the kernel, runs as the same user. Owns its socket. One thread
// at a time. Never raises SIGPIPE. After an error, only destroy the connection.
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
  /// Has to be equal at both ends. Keys differ by purpose, so a peer of one service cannot be redirected to another.
  std::string purpose = "store";
  /// Longer messages are refused at both ends. Memory for a message grows with the received bytes, not with the length
  /// that was announced.
  std::size_t longest_message = (std::size_t{64} << 20) + (std::size_t{64} << 10);
  /// Filter that makes replayed ClientHellos fail, shared by a listener's server ends. Has to outlive their handshakes.
  ReplayFilter* heard = nullptr;
  /// Allows `detach`: nothing is read beyond the record that ends a message, and no TLS close_notify is sent.
  bool detachable = false;
  /// Accepts descriptors sent over a Unix socket (see `take_descriptor`). Otherwise the system closes them.
  bool descriptors = false;
};

/// Tells a server that this process lacks the required secret, so that the server reports the cause to its user. Waits
/// for a server that is not up yet until `deadline`.
void tell_of_no_secret(const Address& server, Deadline deadline) noexcept;

class SecureConnection {
 public:
  /// Does no I/O yet. `socket` is a connected, non-blocking stream socket.
  static Result<SecureConnection> with_secret(sys::UniqueFd socket, Role role, const Secret& secret,
                                              const SecureOptions& options = {});
  /// Fails with InvalidArgument (the message says how to give a secret) if another user runs the Unix socket's other
  /// end.
  static Result<SecureConnection> same_user(sys::UniqueFd socket, Role role, const SecureOptions& options = {});

  SecureConnection(SecureConnection&&) noexcept;
  SecureConnection& operator=(SecureConnection&&) noexcept;
  ~SecureConnection();

  int fd() const noexcept;
  /// True once the other end has proved itself. Before that, no byte of its messages is parsed.
  bool established() const noexcept;
  /// True if the other end's bytes so far were made with the secret and, with `SecureOptions::heard`, are no replay.
  /// For a server that has to choose connections to close before their handshakes end.
  bool credible() const noexcept;
  /// Description of the other end, for messages.
  const std::string& peer() const noexcept;

  // Event-driven use, with level-triggered poll or epoll: watch POLLIN, and POLLOUT while `wants_write()`; call
  // `advance()` when either is ready; then take all messages. For back-pressure, stop watching POLLIN.

  /// Continues the handshake, and sends and receives without blocking (at most about 256 KiB of input a call).
  /// Errors: InvalidArgument "authentication failed: ..." (the secrets differ), Corrupt (bad framing), PeerLost
  /// (reset), Unavailable (the other end closed before the handshake was over).
  Result<void> advance();
  bool wants_write() const noexcept;
  /// Returns the next complete message; nullopt if there is none.
  std::optional<std::string> next_message();
  /// Queues a message, also before the handshake is over. Sends as much as possible without blocking.
  Result<void> queue(std::string_view message);
  /// Also sends a descriptor over a Unix socket; the other end has the descriptor when it has the message.
  Result<void> queue(std::string_view message, sys::UniqueFd descriptor);
  /// Returns the last descriptor received and not yet taken; an empty UniqueFd if there is none.
  sys::UniqueFd take_descriptor() noexcept;
  std::size_t unsent_bytes() const noexcept;
  /// True if the other end has closed its side in good order and all messages have been taken.
  bool at_end() const noexcept;

  /// Socket and keys of a connection whose authenticated ends continue with a protocol of their own.
  struct Detached {
    sys::UniqueFd socket;
    std::array<std::uint8_t, 32> key{};  ///< unique to this connection (RFC 8446, section 7.5)
    std::unique_ptr<TlsStream> stream;   ///< the encryption, with Encryption::Stays
  };
  enum class Encryption { Ends, Stays };
  /// Gives up the socket. Requires `detachable` and a secret. Call when both ends have sent and taken all their
  /// messages; fails with Corrupt if more was received. Afterwards, only destroy this connection.
  Result<Detached> detach(Encryption encryption);

  // Blocking use. Calls fail with Timeout when the deadline passes; the connection stays usable.

  Result<void> handshake(Deadline deadline);
  /// Returns once the system has taken the whole message.
  Result<void> send(std::string_view message, Deadline deadline);
  /// Fails with PeerLost if the other end has closed.
  Result<std::string> receive(Deadline deadline);

 private:
  struct Impl;
  explicit SecureConnection(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// Finds the address, among several, at which the right peer listens. All are tried concurrently, and only a peer that
// proves the secret counts, so an address that belongs to another host here (a docker bridge, a tunnel) does no harm.
// Blocks until the deadline at most; any thread.

/// Addresses are numeric. Fails with PeerLost if a peer answered but closed before it proved the secret (a full server;
/// trying again may help), else with Unavailable or Timeout. The message says what happened at each address.
Result<SecureConnection> reach(std::span<const Endpoint> endpoints, const Secret& secret, const SecureOptions& options,
                               Deadline deadline);

}  // namespace cohort::net
