// Divides a collective into pieces, each the same collective of some of every rank's elements: the same on all ranks,
// by what they have agreed on. If ranks have parts of their own, each part is divided. An element meets the same
// elements as in the whole, in the same order, so bits do not depend on it. Pure.
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

/// Size of a piece: larger operations go in pieces of so many bytes.
std::size_t piece_bytes() noexcept;
/// For measurements and tests: of what is asked for from now on, the same on all ranks. Any thread.
void set_piece_bytes(std::size_t bytes) noexcept;

/// Bytes that belong together: by their positions in a buffer of the request and in the piece's memory.
struct ByteRange {
  std::size_t at = 0;
  std::size_t in_room = 0;
  std::size_t bytes = 0;
};

struct Piece {
  Request request;  ///< of the staging memory
  std::vector<ByteRange> input;
  std::vector<ByteRange> output;
};

class Chunking {
 public:
  Chunking(const Request& request, int rank, int size, std::size_t piece_bytes);

  /// 1: it is left whole. So are all_to_all_v, in which no rank knows the others' parts, and messages.
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

// Host memory of a communicator in which operations go through in pieces, the next into the next of its slots. Belongs
// to the operation that is carried out, of which there is one at a time; operations that wait for their turn keep it.
class Ring {
 public:
  static constexpr std::size_t kSlots = 4;  // one that comes, one that is worked on, and two that go

  struct Slot {
    std::byte* data = nullptr;
    MarkPtr arrived;   // the input, where it is on its way
    MarkPtr departed;  // likewise, the output
  };

  /// `room` has kSlots times `slot_bytes`.
  Ring(Gpu& gpu, std::shared_ptr<std::byte> room, std::size_t slot_bytes);
  /// Memory that a copy may still write is never used again.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  Slot& next() noexcept { return slots_[turn_++ % kSlots]; }
  /// Memory of a peer from now on, so that the GPU reads it as fast as the ring's. False if the driver does not take
  /// it.
  bool pin(const std::shared_ptr<const sys::Mapping>& memory);
  /// Waits a moment for what is under way. False: it still is.
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

/// Waits a moment until a mark has passed, which a stream that hangs keeps from it. True if it has.
bool settled(Gpu& gpu, const MarkPtr& mark, Staging::Clock::time_point limit) noexcept;
/// The end of such a wait.
Staging::Clock::time_point end_of_patience() noexcept;
/// Memory that a copy may still use is kept until the process ends.
void keep_for_good(std::shared_ptr<const void> memory);

// Collectives of a GPU's memory that go through host memory in pieces, and those of a world of one, which stay on the
// GPU. One thread at a time.

class Pieces {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Pieces() = default;
  /// Returns when the result is in its place. `agreed`: what came of a round. Throws what ends the world.
  virtual void run(const Round& agreed, Clock::time_point deadline, Turn& turn, CollectiveEvent* event) = 0;
  /// Does as Staging::abandon, where `run` has not failed itself.
  virtual void abandon(Clock::time_point limit) noexcept = 0;
};

/// The operation that `cut` divides, through `ring`, whose slots hold a piece each.
std::shared_ptr<Pieces> in_pieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut,
                                  std::shared_ptr<Ring> ring, int rank);

/// True if a world of one only has to copy.
bool is_copy(const Request& request) noexcept;
/// Starts such a copy.
std::shared_ptr<Pieces> copy_alone(Gpu& gpu, const Request& request, StreamMarks marks);

}  // namespace cohort::comm::cuda
