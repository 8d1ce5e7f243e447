// TLS 1.3 between two processes that have the job's secret: as a state machine without I/O (TlsSession), and, for bulk
// data, over a socket (TlsStream). ReplayFilter rejects replayed ClientHellos. Each is used by one thread at a time.
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

// Rejects replayed ClientHellos: remembers the ClientHellos that a listener has accepted, each of which was proved to
// be made with the secret. Only holders of the secret can make new ones, so others cannot fill the filter. Beyond its
// capacity the filter forgets the oldest. One thread at a time.
class ReplayFilter {
 public:
  /// The random number of a ClientHello.
  using Words = std::array<std::uint8_t, 32>;

  explicit ReplayFilter(std::size_t most = std::size_t{1} << 16) : most_(most) {}

  /// Remembers `words`. Returns false if they were seen before, so the ClientHello is a replay.
  bool first_time(const Words& words);
  bool knows(const Words& words) const { return words_.contains(words); }

 private:
  std::size_t most_;
  std::set<Words> words_;
  std::deque<std::set<Words>::const_iterator> oldest_;
};

// TLS 1.3 over a connected, non-blocking stream socket, for bulk data, with the semantics of read and write. A
// SecureConnection has already authenticated the two ends; the stream continues its session. The socket belongs to the
// caller. A socket error is PeerLost, with errno as the system set it; an encryption error is Corrupt. Never raises
// SIGPIPE. One thread at a time.

class TlsEnd;

class TlsStream {
 public:
  /// `end` has finished its handshake.
  static Result<std::unique_ptr<TlsStream>> make(std::unique_ptr<TlsEnd> end, int fd);
  ~TlsStream();

  /// Returns how many of the bytes were taken; 0 if the socket is full. The caller passes the remaining bytes again in
  /// the next call, possibly with more behind them. Reads nothing.
  Result<std::size_t> write(std::span<const std::byte> bytes);
  /// Returns the number of bytes read; nullopt if there are none for now, 0 at the end of the stream.
  Result<std::optional<std::size_t>> read(std::span<std::byte> to);
  /// True if `read` would return bytes that were already received from the socket, which poll does not report.
  bool holds_bytes() const noexcept;

 private:
  explicit TlsStream(std::unique_ptr<TlsEnd> end);
  std::unique_ptr<TlsEnd> end_;
  std::uint64_t under_key_ = 0;  // bytes written since the key was changed
};

// TLS 1.3 as a state machine without I/O: takes bytes from the peer, and produces bytes for the peer. Authentication is
// only by a pre-shared key, derived from the job's secret; every session has a fresh X25519 exchange. One thread at a
// time. (RFC 8446 section 2.2; external PSKs as RFC 9257 requires: 256 random bits, one per job and purpose.)

/// Error text for two ends with different secrets.
inline constexpr std::string_view kSecretDiffers =
    "the secret differs from this process's -- start all ranks with the same COHORT_SECRET_FILE, or by one `cohort "
    "run`";

class TlsSession {
 public:
  /// Name of the key, which a client sends unencrypted: the service's name, then a tag derived from the secret. The
  /// name proves nothing, since others may have seen it, but a client that does not know it gets no TLS answer.
  static std::string service_name(std::string_view purpose);
  static std::string key_name(const Secret& secret, std::string_view purpose);

  static Result<std::unique_ptr<TlsSession>> make(bool server, const Secret& secret, std::string_view purpose);
  ~TlsSession();

  Result<void> feed(std::string_view bytes);
  /// Returns true when the handshake is over and the peer has proved the secret. An error says what the peer did wrong.
  Result<bool> handshake();
  /// On a server, returns the client's hello after it is proved to be made with the secret.
  std::optional<ReplayFilter::Words> proven_hello() const;
  /// Appends decrypted bytes to `plain`. Returns false when the peer has sent close_notify.
  Result<bool> read(std::string& plain);
  Result<void> write(std::string_view plain);
  /// Derives a key unique to this connection; both ends get the same key for the same label.
  Result<std::array<std::uint8_t, 32>> export_key(std::string_view label) const;
  /// Continues directly over the socket, which belongs to the caller. All input has to be read, and all output sent.
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
