// TLS 1.3 between two that have the job's secret: as a machine that does no I/O (TlsSession), and, for bulk data, over
// a socket (TlsStream). The filter rejects replayed ClientHellos. Each is used by one thread at a time.
#pragma once

#include "base/result.h"
#include "net/secret.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

namespace cohort::net {

// Rejects replayed ClientHellos: remembers those that a listener has accepted, each proved to be made with the secret.
// Only holders of the secret make new ones, so others cannot fill it; beyond its capacity the oldest are forgotten. One
// thread at a time.
class ReplayFilter {
 public:
  /// The random number of a ClientHello.
  using Words = std::array<std::uint8_t, 32>;

  explicit ReplayFilter(std::size_t most = std::size_t{1} << 16) : most_(most) {}

  /// False: it has been seen before, so it is a replay.
  bool first_time(const Words& words);
  bool knows(const Words& words) const { return words_.contains(words); }

 private:
  std::size_t most_;
  std::set<Words> words_;
  std::deque<std::set<Words>::const_iterator> oldest_;
};

// TLS 1.3 over a connected, non-blocking stream socket, for bulk data: what read and write are for a plain one. The two
// ends have proved each other already, by a SecureConnection that this goes on from. The socket belongs to the caller.
// An error of it is PeerLost, with errno as the system set it; what breaks the encryption is Corrupt. Never raises
// SIGPIPE. One thread at a time.

class TlsEnd;

class TlsStream {
 public:
  /// `end` is past its handshake.
  static Result<std::unique_ptr<TlsStream>> make(std::unique_ptr<TlsEnd> end, int fd);
  ~TlsStream();

  /// How many of these bytes were taken: 0 if the socket is full. The next call gives the others again, and perhaps
  /// more behind them. Reads nothing.
  Result<std::size_t> write(std::span<const std::byte> bytes);
  /// How many bytes came: nullopt if there are none for now, 0 at the end.
  Result<std::optional<std::size_t>> read(std::span<std::byte> to);
  /// Bytes have come that `read` would give without the socket: no poll reports them.
  bool holds_bytes() const noexcept;

 private:
  explicit TlsStream(std::unique_ptr<TlsEnd> end);
  std::unique_ptr<TlsEnd> end_;
  std::uint64_t under_key_ = 0;  // bytes written since it was changed
};

// TLS 1.3 as a machine that does no I/O: bytes of the peer in, bytes for the peer out. Authentication is by a
// pre-shared key alone, made from the job's secret; every session has a fresh X25519 exchange. One thread at a time.
// (RFC 8446 section 2.2; external PSKs as RFC 9257 asks for: 256 bits from a generator, one per job and purpose.)

/// Error if the secrets of two ends are not the same.
inline constexpr std::string_view kSecretDiffers =
    "the secret differs from this process's -- start all ranks with the same COHORT_SECRET_FILE, or by one `cohort "
    "run`";

class TlsSession {
 public:
  /// The name of the key, which a client says in the clear: the service's, then a tag that only the secret gives. It
  /// proves nothing, since others may have seen it, but a client that does not know it need not be answered by TLS.
  static std::string service_name(std::string_view purpose);
  static std::string key_name(const Secret& secret, std::string_view purpose);

  static Result<std::unique_ptr<TlsSession>> make(bool server, const Secret& secret, std::string_view purpose);
  ~TlsSession();

  Result<void> feed(std::string_view bytes);
  /// True when it is over and the peer has proved the secret; an error says what was wrong with the peer.
  Result<bool> handshake();
  /// On a server: the client's hello, once it is proved to be made with the secret.
  std::optional<ReplayFilter::Words> proven_hello() const;
  /// Appends what has been decrypted; false when the peer has said good-bye.
  Result<bool> read(std::string& plain);
  Result<void> write(std::string_view plain);
  /// Derives a key of this connection alone; both ends get the same for one label.
  Result<std::array<std::uint8_t, 32>> export_key(std::string_view label) const;
  /// Goes on over the socket itself, which belongs to the caller. All that was fed has to be read, and written sent.
  Result<std::unique_ptr<TlsStream>> into_stream(int fd) &&;
  void close();
  /// Bytes for the peer, to be sent after each of the calls above.
  std::string take_output();

 private:
  struct Impl;
  explicit TlsSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::net
