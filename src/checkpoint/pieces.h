// Bytes from one rank to another, in pieces, so that neither needs room for all of them. Both ranks know how many there
// are. One thread per communicator; the buffers live as long as the objects.
#pragma once

#include <cohort/communicator.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cohort::checkpoint {

/// Bytes of a piece, at most.
inline constexpr std::size_t kPiece = std::size_t{4} << 20;

class PieceSender {
 public:
  PieceSender(Communicator& comm, int to);
  void add(std::span<const std::byte> bytes);
  /// The last piece, once everything has been added.
  void flush();

 private:
  Communicator& comm_;
  const int to_;
  std::vector<std::byte> piece_;
};

class PieceReceiver {
 public:
  PieceReceiver(Communicator& comm, int from, std::uint64_t bytes);
  bool at_end() const noexcept { return left_ == 0; }
  /// Good until the next call.
  std::span<const std::byte> next();

 private:
  Communicator& comm_;
  const int from_;
  std::uint64_t left_;
  std::vector<std::byte> piece_;
};

void send_bytes(Communicator& comm, std::span<const std::byte> bytes, int to);
void receive_bytes(Communicator& comm, std::span<std::byte> bytes, int from);

}  // namespace cohort::checkpoint
