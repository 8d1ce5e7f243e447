// Divides a collective into pieces; a piece is the same collective over some of each rank's elements. The division
// follows from the agreed request, so it is the same on all ranks. If each rank has its own part, every part is
// divided. An element is combined with the same elements, in the same order, as without division, so results have the
// same bits. Pure.
#pragma once

#include "base/memory.h"
#include "comm/api/request.h"
#include "comm/engine/queue.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/staging.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace cohort::comm::cuda {

inline constexpr std::size_t kCacheLine = 64;

/// Returns the size of a piece; larger operations are divided into pieces of this size.
std::size_t piece_bytes() noexcept;
/// Sets the size of pieces for later requests, for measurements and tests; the same on all ranks. Any thread.
void set_piece_bytes(std::size_t bytes) noexcept;

/// Contiguous bytes: their position in a buffer of the request (`at`), and in the piece's memory (`in_room`).
struct ByteRange {
  std::size_t at = 0;
  std::size_t in_room = 0;
  std::size_t bytes = 0;
};

struct Piece {
  Request request;  ///< with buffers in the staging memory
  std::vector<ByteRange> input;
  std::vector<ByteRange> output;
};

class Chunking {
 public:
  Chunking(const Request& request, int rank, int size, std::size_t piece_bytes);

  /// Number of pieces; 1 if the operation is not divided. all_to_all_v, in which no rank knows the others' parts, and
  /// messages are never divided.
  std::size_t pieces() const noexcept { return pieces_; }
  /// Largest number of bytes of staging memory that a piece needs.
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
  std::vector<std::int64_t> parts_;  // number of elements of each part
  std::size_t pieces_ = 1;
};

// A communicator's host memory for operations in pieces: consecutive pieces use consecutive slots. Only the running
// operation uses it; operations that wait for their turn keep it alive.
class Ring {
 public:
  static constexpr std::size_t kSlots = 4;  // one piece being copied in, one being processed, two being copied out

  struct Slot {
    std::byte* data = nullptr;
    MarkPtr arrived;   // end of the copy of the input, if one is under way
    MarkPtr departed;  // end of the copy of the output, if one is under way
  };

  /// `room` has kSlots times `slot_bytes` bytes.
  Ring(Gpu& gpu, std::shared_ptr<std::byte> room, std::size_t slot_bytes);
  /// Never frees memory that a copy may still write.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  Slot& next() noexcept { return slots_[turn_++ % kSlots]; }
  /// Pins a peer's memory, so that the GPU reads it as fast as the ring's own. Returns false if the driver refuses.
  bool pin(const std::shared_ptr<const sys::Mapping>& memory);
  /// Waits a moment for copies under way. Returns false if some are not over.
  bool settle() noexcept;

 private:
  Gpu& gpu_;
  std::shared_ptr<std::byte> room_;
  const std::size_t slot_bytes_;
  std::array<Slot, kSlots> slots_;
  struct Pinned {
    std::shared_ptr<const sys::Mapping> memory;
    bool pinned;
  };
  std::map<const sys::Mapping*, Pinned> peers_;
  std::size_t turn_ = 0;
};

/// Waits until `limit` for a mark to pass; a hung stream never passes it. Returns whether the mark has passed.
bool settled(Gpu& gpu, const MarkPtr& mark, Staging::Clock::time_point limit) noexcept;
/// Returns the usual limit for `settled`, a moment from now.
Staging::Clock::time_point end_of_patience() noexcept;
/// Keeps memory until the process ends, because a copy may still use it.
void keep_for_good(std::shared_ptr<const void> memory);

// Collectives on GPU memory in pieces through host memory, and collectives of a world of one, which stay on the GPU.
// One thread at a time.

class Pieces {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Pieces() = default;
  /// Returns when the result is in the output. `agreed` is the outcome of a round. Throws the error that ends the
  /// world.
  virtual void run(const Round& agreed, Clock::time_point deadline, Turn& turn, CollectiveEvent* event) = 0;
  /// Does what Staging::abandon does, if `run` itself has not failed.
  virtual void abandon(Clock::time_point limit) noexcept = 0;
};

/// Makes an operation that runs in the pieces of `cut` through `ring`. A slot has to hold a whole piece.
std::shared_ptr<Pieces> in_pieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut,
                                  std::shared_ptr<Ring> ring, int rank);

/// True if the operation only has to copy, in a world of one.
bool is_copy(const Request& request) noexcept;
/// Starts the copy of an operation for which `is_copy` is true.
std::shared_ptr<Pieces> copy_alone(Gpu& gpu, const Request& request, StreamMarks marks);

}  // namespace cohort::comm::cuda
