// TLS 1.3 as a machine that does no I/O: bytes of the peer in, bytes for the peer out. Authentication is by a
// pre-shared key alone, made from the job's secret; every session has a fresh X25519 exchange. One thread at a time.
// (RFC 8446 section 2.2; external PSKs as RFC 9257 asks for: 256 bits from a generator, one per job and purpose.)
#pragma once

#include "base/result.h"
#include "net/replay_filter.h"
#include "net/secret.h"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::net {

class TlsStream;

/// Of two ends whose secrets are not the same one.
inline constexpr std::string_view kSecretDiffers =
    "the secret differs from this process's -- start all ranks with the same COHORT_SECRET_FILE, or by one `cohort "
    "run`";

class TlsSession {
 public:
  /// The name of the key, which a client says in the clear: the service's, then a tag that only the secret gives. It
  /// proves nothing, since others may have heard it, but who does not know it need not be answered by TLS.
  static std::string service_name(std::string_view purpose);
  static std::string key_name(const Secret& secret, std::string_view purpose);

  static Result<std::unique_ptr<TlsSession>> make(bool server, const Secret& secret, std::string_view purpose);
  ~TlsSession();

  Result<void> feed(std::string_view bytes);
  /// True when it is over and the peer has proved the secret; an error says what was wrong with the peer.
  Result<bool> handshake();
  /// Of a server: the client's hello, once it is proved to be made with the secret.
  std::optional<ReplayFilter::Words> proven_hello() const;
  /// Appends what has been decrypted; false when the peer has said good-bye.
  Result<bool> read(std::string& plain);
  Result<void> write(std::string_view plain);
  /// Of this connection alone; both ends get the same for one label.
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
