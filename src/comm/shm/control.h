// The memory that the ranks of a host agree through, and in it the rings by which messages go.
#pragma once

#include "base/process.h"
#include "comm/engine/agreement.h"
#include "comm/engine/channel.h"
#include "comm/shm/protocol.h"

#include <cohort/dtype.h>
#include <cohort/error.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>

namespace cohort::comm::local {

// The memory through which two ranks of a host send to each other: for each ordered pair a ring of
// cells of one cache line, with space for small payloads in or beside them. A ring's cells are written by the sender,
// its counters by the receiver (but for `full`). Counters only grow. Plain layout; shm_channels.cpp holds the rules.
struct alignas(64) Cell {
  static constexpr std::size_t kInline = 40;
  /// Part of all headers but those with a payload.
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
  std::atomic<std::uint32_t> full;       ///< the sender's: it waits for space
};

/// The word that a rank's threads sleep on while messages may come.
struct alignas(64) WakeupWord {
  std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
};

/// A wakeup for each rank, then the rings; zeroes are the initial state.
class ShmRingLayout {
 public:
  explicit constexpr ShmRingLayout(std::size_t ranks) noexcept : ranks_(ranks) {}

  constexpr std::size_t cells() const noexcept { return ranks_ <= 64 ? 8 : ranks_ <= 256 ? 4 : 2; }
  /// Space beside a cell: so that a world of 8 takes 4 MB, one of 64 takes 11.
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
  /// The cell with this number (from 1).
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

// The memory through which the ranks of one host agree: one segment, made by rank 0 and mapped by all. Every word
// has one writer (its rank), but for the header's abort record, bell and tickets; the header's plan is rank 0's.
// Counters only grow. Plain layout without pointers; protocol.h holds the rules.

inline constexpr std::size_t kLine = 64;  // bytes of a cache line
// Prefetchers fetch lines in pairs: what different ranks write, or one polls and another writes, is this far apart.
inline constexpr std::size_t kApart = 128;
inline constexpr int kMostRanks = 1024;  // so that a chunk has a line for each

/// An operation's announcement. There are two, by the parity of the sequence: a rank writes one again only after all
/// ranks have come to the operation between, and so have left the one before. The payload, if it is small, lies in
/// `tiny` or behind the slot. The descriptor is in lines of its own, which nobody reads while small operations agree.
struct alignas(kApart) Slot {
  static constexpr std::size_t kTiny = 48;
  std::atomic<std::uint64_t> sequence;  ///< of what follows; stored last, with release
  std::uint64_t fingerprint;            ///< of the descriptor, so that one cache line shows that ranks agree
  std::byte tiny[kTiny];
  alignas(kApart) Descriptor descriptor;
};
static_assert(sizeof(Slot) == 2 * kApart && offsetof(Slot, descriptor) == kApart);

struct alignas(kApart) Counter {
  std::atomic<std::uint64_t> value;
};

struct alignas(kApart) RankState {
  Counter staged;    ///< chunks that this rank has copied into its staging buffers
  Counter reduced;   ///< chunks from whose inputs this rank has read all it needs
  Counter folded;    ///< sequence of the last cross-memory reduction whose own slice this rank has folded
  Counter finished;  ///< sequence of the last operation without staging in which this rank has read and written all
  Counter probe;     ///< turns in the measurement of the cores' distance
  alignas(kApart) std::atomic<std::uint32_t> ready;  ///< has mapped this memory
  std::atomic<std::uint32_t> left;                   ///< its communicator was destroyed
  std::atomic<std::uint32_t> reads_peers;            ///< may read all peers' memory (1), or not (2); 0: not known yet
  std::atomic<std::uint32_t> away;                   ///< waits for a rank on another host, in a larger world
  std::atomic<std::uint64_t> over;                   ///< operations that ended there after their turn (Queue)
  /// Sequences of the last operations, by parity, in which this rank has made a result that is not finite and somebody
  /// asks for it. Written before the counter that says that this rank has made its results.
  std::atomic<std::uint64_t> non_finite[2];
  /// Addresses of chunks, by the parity of their numbers, in this rank's process, where peers read them there. Written
  /// before `staged`.
  std::uint64_t borrowed[2];
  std::uint64_t control_address;  ///< of this memory in its process; written before `ready`
  sys::CoreSet cores;             ///< written before `ready`
  Slot slots[2];

  /// The last operation that this rank has come to. Any thread.
  std::uint64_t begun() const noexcept { return std::max(slots[0].sequence.load(), slots[1].sequence.load()); }
};

/// Reason why the world ended. Written once, by the caller that changes `state` from kNone to kWriting.
struct AbortRecord {
  static constexpr std::uint32_t kNone = 0, kWriting = 1, kSet = 2;
  alignas(kLine) std::atomic<std::uint32_t> state;
  ErrorCode code;
  std::int32_t reporter;
  std::int32_t peer;
  std::uint64_t sequence;
  char text[1024];
};

/// A threshold that no size reaches.
inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

/// Rank 0's decisions for all (plan.h). Written before its `ready`.
struct Plan {
  std::uint64_t inline_bytes = 0;  ///< payloads of reductions up to this size lie beside the announcement: one wait
  std::uint64_t inline_root_bytes = 0;   ///< the same for reductions of which one rank has the result
  std::uint64_t inline_copy_bytes = 0;   ///< the same for operations that only move data
  std::uint64_t cross_reduce_bytes = 0;  ///< reductions read peers' memory through the kernel from this size on
  std::uint64_t cross_copy_bytes = 0;    ///< the same for operations that only move data
  std::uint64_t chunk_bytes = 0;         ///< staged operations go in chunks of this size
  std::uint32_t zero_copy = 1;           ///< registered memory is read in place
  std::uint32_t stores = 0;              ///< StorePolicy
};

struct Header {
  static constexpr std::uint64_t kMagic = 0x35304c4f43484f43;  // "COHCOL05"
  std::uint64_t magic;
  std::uint64_t id;  ///< of this world, not 0: random, for readers of several
  std::uint32_t ranks;
  std::uint32_t chunk_bytes;
  Plan plan;
  std::atomic<std::uint32_t> plan_ready;
  AbortRecord abort;
  alignas(kApart) std::atomic<std::uint32_t> bell;  ///< ranks that wait long sleep on it
  alignas(kApart) std::atomic<std::uint32_t> sleepers;
  alignas(kApart) std::atomic<std::int64_t> join_tickets;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// Header, rank states, payloads beside the slots, then each rank's staging buffers (two for its inputs, two for what
/// it has reduced), then the rings of send and recv.
class ControlLayout {
 public:
  explicit ControlLayout(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  /// The most that a chunk may have.
  std::size_t chunk_bytes() const noexcept { return ranks_ <= 8 ? std::size_t{256} << 10 : std::size_t{64} << 10; }
  /// The best size: what is under way at once stays in the caches of a core, also of one that serves several ranks.
  std::size_t usual_chunk_bytes() const noexcept { return std::min(chunk_bytes(), std::size_t{128} << 10); }
  /// Space beside a slot, and so the most that `Plan::inline_bytes` may be.
  std::size_t payload_bytes() const noexcept { return ranks_ <= 8 ? std::size_t{64} << 10 : std::size_t{8} << 10; }
  std::size_t bytes() const noexcept { return rings_offset() + ring_layout().bytes(); }
  ShmRingLayout ring_layout() const noexcept { return ShmRingLayout(ranks_); }

  static Header& header(void* base) noexcept { return *static_cast<Header*>(base); }
  RankState& state(void* base, int rank) const noexcept {
    return *reinterpret_cast<RankState*>(static_cast<std::byte*>(base) + states_offset() +
                                         static_cast<std::size_t>(rank) * sizeof(RankState));
  }
  std::byte* payload(void* base, int rank, std::uint64_t sequence) const noexcept {
    return static_cast<std::byte*>(base) + payloads_offset() +
           (static_cast<std::size_t>(rank) * 2 + static_cast<std::size_t>(sequence % 2)) * payload_bytes();
  }
  std::byte* rings(void* base) const noexcept { return static_cast<std::byte*>(base) + rings_offset(); }
  std::byte* staging(void* base, int rank, std::uint64_t chunk) const noexcept { return buffer(base, rank, chunk % 2); }
  std::byte* results(void* base, int rank, std::uint64_t chunk) const noexcept {
    return buffer(base, rank, 2 + chunk % 2);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t pages(std::size_t bytes) noexcept { return (bytes + kPage - 1) / kPage * kPage; }
  static std::size_t states_offset() noexcept { return pages(sizeof(Header)); }
  std::size_t payloads_offset() const noexcept { return pages(states_offset() + ranks_ * sizeof(RankState)); }
  std::size_t staging_offset() const noexcept { return payloads_offset() + ranks_ * 2 * payload_bytes(); }
  std::size_t rings_offset() const noexcept { return staging_offset() + ranks_ * 4 * chunk_bytes(); }
  std::byte* buffer(void* base, int rank, std::uint64_t index) const noexcept {
    return static_cast<std::byte*>(base) + staging_offset() +
           (static_cast<std::size_t>(rank) * 4 + static_cast<std::size_t>(index)) * chunk_bytes();
  }
  std::size_t ranks_;
};

}  // namespace cohort::comm::local
