// TLS 1.3 over a connected, non-blocking stream socket, for bulk data: what read and write are for a plain one. The two
// ends have proved each other already and have a key that nobody else has; this adds secrecy, integrity and a fresh
// X25519 exchange. The socket belongs to the caller. An error of it is PeerLost, with errno as the system set it; what
// breaks the encryption is Corrupt. Never raises SIGPIPE. One thread at a time.
#pragma once

#include "base/result.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace cohort::net {

class TlsEnd;

class TlsStream {
 public:
  static Result<std::unique_ptr<TlsStream>> make(int fd, bool server, const std::array<std::uint8_t, 32>& key);
  ~TlsStream();

  /// How many of these bytes were taken: 0 if the socket is full or the handshake, which `read` goes on with, is not
  /// over. Whoever calls again gives the same bytes again, and perhaps more behind them. Reads nothing.
  Result<std::size_t> write(std::span<const std::byte> bytes);
  /// How many bytes came: nullopt if there are none for now, 0 at the end. Goes on with the handshake.
  Result<std::optional<std::size_t>> read(std::span<std::byte> to);
  /// Bytes have come that `read` would give without the socket: no poll tells of them.
  bool holds_bytes() const noexcept;
  /// Until then writing is no use.
  bool established() const noexcept { return established_; }

 private:
  explicit TlsStream(std::unique_ptr<TlsEnd> end);
  std::unique_ptr<TlsEnd> end_;
  std::uint64_t under_key_ = 0;  // bytes written since it was changed
  bool established_ = false;
};

}  // namespace cohort::net
