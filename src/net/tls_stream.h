// TLS 1.3 over a connected, non-blocking stream socket, for bulk data: what read and write are for a plain one. The two
// ends have proved each other already, by a SecureConnection that this goes on from. The socket belongs to the caller.
// An error of it is PeerLost, with errno as the system set it; what breaks the encryption is Corrupt. Never raises
// SIGPIPE. One thread at a time.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace cohort::net {

class TlsEnd;

class TlsStream {
 public:
  /// `end` is past its handshake.
  static Result<std::unique_ptr<TlsStream>> make(std::unique_ptr<TlsEnd> end, int fd);
  ~TlsStream();

  /// How many of these bytes were taken: 0 if the socket is full. Whoever calls again gives the same bytes again, and
  /// perhaps more behind them. Reads nothing.
  Result<std::size_t> write(std::span<const std::byte> bytes);
  /// How many bytes came: nullopt if there are none for now, 0 at the end.
  Result<std::optional<std::size_t>> read(std::span<std::byte> to);
  /// Bytes have come that `read` would give without the socket: no poll tells of them.
  bool holds_bytes() const noexcept;

 private:
  explicit TlsStream(std::unique_ptr<TlsEnd> end);
  std::unique_ptr<TlsEnd> end_;
  std::uint64_t under_key_ = 0;  // bytes written since it was changed
};

}  // namespace cohort::net
