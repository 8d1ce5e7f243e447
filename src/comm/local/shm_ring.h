// The memory through which two ranks of a host send to each other: for each ordered pair a ring of
// cells of one cache line, with room for small payloads in or beside them. A ring's cells are written by the sender,
// its counters by the receiver (but for `full`). Counters only grow. Plain layout; shm_channels.h holds the rules.
#pragma once

#include "comm/messages/message_header.h"

#include <cohort/dtype.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cohort::comm::local {

struct alignas(64) Cell {
  static constexpr std::size_t kInline = 40;
  /// Of all headers but those with a payload.
  struct About {
    std::uint64_t offer;
    std::uint64_t address;
    std::int64_t expected_count;
  };

  std::atomic<std::uint64_t> stamp;  ///< number of what follows in its ring, from 1; stored last, with release
  std::int64_t count;                ///< elements; of a fragment (OfChannel) bytes
  std::int32_t tag;
  messages::HeaderKind kind;
  DType dtype;
  DType expected;
  union {
    std::byte payload[kInline];
    About about;
  };
};
static_assert(sizeof(Cell) == 64);

struct alignas(64) ShmRingHead {
  std::atomic<std::uint64_t> taken;      ///< cells that the receiver does not need any more
  std::atomic<std::uint64_t> delivered;  ///< eager messages that have met their receive
  std::atomic<std::uint32_t> full;       ///< the sender's: it waits for room
};

/// What a rank's threads sleep on while messages may come.
struct alignas(64) WakeupWord {
  std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
};

/// A wakeup for each rank, then the rings; zeroes are the initial state.
class ShmRingLayout {
 public:
  explicit constexpr ShmRingLayout(std::size_t ranks) noexcept : ranks_(ranks) {}

  constexpr std::size_t cells() const noexcept { return ranks_ <= 64 ? 8 : ranks_ <= 256 ? 4 : 2; }
  /// Room beside a cell: so that a world of 8 takes 4 MB, one of 64 takes 11.
  constexpr std::size_t cell_bytes() const noexcept {
    return ranks_ <= 4 ? 16384 : ranks_ <= 8 ? 8192 : ranks_ <= 16 ? 2048 : ranks_ <= 64 ? 256 : 64;
  }
  constexpr std::size_t bytes() const noexcept {
    return ranks_ < 2 ? 0 : ranks_ * sizeof(WakeupWord) + ranks_ * ranks_ * ring_bytes();
  }

  WakeupWord& wakeup(std::byte* base, std::size_t rank) const noexcept {
    return *reinterpret_cast<WakeupWord*>(base + rank * sizeof(WakeupWord));
  }
  std::byte* ring(std::byte* base, std::size_t from, std::size_t to) const noexcept {
    return base + ranks_ * sizeof(WakeupWord) + (from * ranks_ + to) * ring_bytes();
  }

 private:
  constexpr std::size_t ring_bytes() const noexcept {
    return sizeof(ShmRingHead) + cells() * (sizeof(Cell) + cell_bytes());
  }
  std::size_t ranks_;
};

/// One direction between two ranks.
class ShmRing {
 public:
  ShmRing() = default;
  ShmRing(const ShmRingLayout& layout, std::byte* base, int from, int to) noexcept
      : head_(layout.ring(base, static_cast<std::size_t>(from), static_cast<std::size_t>(to))),
        cells_(layout.cells()),
        cell_bytes_(layout.cell_bytes()) {}

  ShmRingHead& head() const noexcept { return *reinterpret_cast<ShmRingHead*>(head_); }
  /// Where the cell with this number (from 1) stands.
  Cell& cell(std::uint64_t number) const noexcept {
    return *reinterpret_cast<Cell*>(head_ + sizeof(ShmRingHead) + slot(number) * sizeof(Cell));
  }
  std::byte* beside(std::uint64_t number) const noexcept {
    return head_ + sizeof(ShmRingHead) + cells_ * sizeof(Cell) + slot(number) * cell_bytes_;
  }
  std::size_t cells() const noexcept { return cells_; }

 private:
  std::size_t slot(std::uint64_t number) const noexcept { return static_cast<std::size_t>(number - 1) & (cells_ - 1); }
  std::byte* head_ = nullptr;
  std::size_t cells_ = 0;
  std::size_t cell_bytes_ = 0;
};

}  // namespace cohort::comm::local
