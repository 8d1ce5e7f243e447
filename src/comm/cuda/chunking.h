// How a collective is cut into pieces, each the same collective of some of every rank's elements: the same on all
// ranks, by what they have agreed on. Where ranks have parts of their own, each part is cut. An element meets the same
// elements as in the whole, in the same order, so bits do not depend on it. Pure.
#pragma once

#include "comm/request.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::comm::cuda {

inline constexpr std::size_t kCacheLine = 64;

/// What is larger goes in pieces of so many bytes.
std::size_t piece_bytes() noexcept;
/// For measurements and tests: of what is asked for from now on, the same on all ranks. Any thread.
void set_piece_bytes(std::size_t bytes) noexcept;

/// Bytes that belong together: by their places in a buffer of the request and in the piece's room.
struct ByteRange {
  std::size_t at = 0;
  std::size_t in_room = 0;
  std::size_t bytes = 0;
};

struct Piece {
  Request request;  ///< of the room's memory
  std::vector<ByteRange> input;
  std::vector<ByteRange> output;
};

class Chunking {
 public:
  Chunking(const Request& request, int rank, int size, std::size_t piece_bytes);

  /// 1: it is left whole. So are all_to_all_v, of which no rank knows what the others bring, and messages.
  std::size_t pieces() const noexcept { return pieces_; }
  /// Bytes that a piece needs at most.
  std::size_t room() const noexcept;
  Piece piece(std::size_t which, std::byte* room) const;

 private:
  std::int64_t begin(std::int64_t part, std::size_t which) const noexcept;
  std::size_t sides() const noexcept { return kind_ == Kind::AllToAll ? 2 : 1; }

  const Request request_;
  const Kind kind_;
  const int rank_;
  const std::size_t element_;
  const std::int64_t unit_;          // elements that stay together
  std::vector<std::int64_t> parts_;  // elements of each
  std::size_t pieces_ = 1;
};

}  // namespace cohort::comm::cuda
