// The control memory, through which the ranks of a host agree, and the message rings in it.
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

// The memory through which two ranks of a host send to each other: for each ordered pair, a ring of
// cells of one cache line, with space for small payloads in or beside them. The sender writes a ring's cells and
// `full`, the receiver its counters. Counters only grow. Plain layout; shm_channels.cpp holds the rules.
struct alignas(64) Cell {
  static constexpr std::size_t kInline = 40;
  /// Fields of a header that comes without a payload.
  struct About {
    std::uint64_t offer;
    std::uint64_t address;
    std::int64_t expected_count;
  };

  std::atomic<std::uint64_t> stamp;  ///< number of this header in the ring, from 1; stored last, with release
  std::int64_t count;                ///< elements; bytes in a fragment (OfChannel)
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
  std::atomic<std::uint64_t> taken;      ///< number of cells that the receiver does not need any more
  std::atomic<std::uint64_t> delivered;  ///< number of eager messages that have met their receive
  std::atomic<std::uint32_t> full;       ///< 1 if the sender waits for space
};

/// The word on which a rank's threads sleep while they wait for messages.
struct alignas(64) WakeupWord {
  std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
};

/// Layout of a wakeup word for each rank, followed by the rings. The initial state is all zeroes.
class ShmRingLayout {
 public:
  explicit constexpr ShmRingLayout(std::size_t ranks) noexcept : ranks_(ranks) {}

  constexpr std::size_t cells() const noexcept { return ranks_ <= 64 ? 8 : ranks_ <= 256 ? 4 : 2; }
  /// Space beside a cell. With these sizes the rings of 8 ranks take 4 MB, and those of 64 ranks 11 MB.
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

/// The ring of one direction between two ranks.
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
// has one writer (its rank), except the header's abort record, bell and tickets; rank 0 writes the header's plan.
// Counters only grow. Plain layout without pointers; protocol.h holds the rules.

inline constexpr std::size_t kLine = 64;  // bytes of a cache line
// Distance between words that different ranks write, or that one rank polls while another writes near them.
// (Prefetchers fetch cache lines in pairs.)
inline constexpr std::size_t kApart = 128;
inline constexpr int kMostRanks = 1024;  // a chunk has a cache line for each rank

/// A rank's announcement of an operation. A rank has two slots; the parity of the sequence chooses one. It rewrites a
/// slot only after all ranks have announced the operation that followed the slot's last one, and so have left that one.
/// A small payload lies in `tiny` or in the layout's `payload`. The descriptor has cache lines of its own, which no
/// rank reads while small operations agree.
struct alignas(kApart) Slot {
  static constexpr std::size_t kTiny = 48;
  std::atomic<std::uint64_t> sequence;  ///< number of the announced operation; stored last, with release
  std::uint64_t fingerprint;            ///< the descriptor's fingerprint; so one cache line shows that ranks agree
  std::byte tiny[kTiny];
  alignas(kApart) Descriptor descriptor;
};
static_assert(sizeof(Slot) == 2 * kApart && offsetof(Slot, descriptor) == kApart);

struct alignas(kApart) Counter {
  std::atomic<std::uint64_t> value;
};

struct alignas(kApart) RankState {
  Counter staged;    ///< number of chunks that this rank has copied into its staging buffers
  Counter reduced;   ///< number of chunks of which this rank has read all inputs that it needs
  Counter folded;    ///< sequence of the last cross-memory reduction in which this rank has folded its own slice
  Counter finished;  ///< last operation without staging in which this rank has read and written all its data
  Counter probe;     ///< turn in the measurement of the cores' distance
  alignas(kApart) std::atomic<std::uint32_t> ready;  ///< 1 after this rank has mapped the control memory
  std::atomic<std::uint32_t> left;                   ///< 1 after this rank's communicator was destroyed
  std::atomic<std::uint32_t> reads_peers;            ///< 1: may read all peers' memory; 2: may not; 0: not known yet
  std::atomic<std::uint32_t> away;                   ///< not 0 while this rank waits for another host in a larger world
  std::atomic<std::uint64_t> over;                   ///< number of operations that have ended after their turn (Queue)
  /// Sequences, by parity, of the last operations in which a check was requested and this rank made a result that is
  /// not finite. Written before the counter that shows that this rank has made its results.
  std::atomic<std::uint64_t> non_finite[2];
  /// Addresses, in this rank's process, of the chunks that peers read in its memory, by the parity of their numbers.
  /// Written before `staged`.
  std::uint64_t borrowed[2];
  std::uint64_t control_address;  ///< address of the control memory in this rank's process; written before `ready`
  sys::CoreSet cores;             ///< cores on which this rank may run; written before `ready`
  Slot slots[2];

  /// Sequence of the last operation that this rank has announced. Any thread.
  std::uint64_t begun() const noexcept { return std::max(slots[0].sequence.load(), slots[1].sequence.load()); }
};

/// Reason why the world ended. Written once, by the thread that changes `state` from kNone to kWriting.
struct AbortRecord {
  static constexpr std::uint32_t kNone = 0, kWriting = 1, kSet = 2;
  alignas(kLine) std::atomic<std::uint32_t> state;
  ErrorCode code;
  std::int32_t reporter;
  std::int32_t peer;
  std::uint64_t sequence;
  char text[1024];
};

/// A limit that no size reaches.
inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

/// Decisions that rank 0 makes for all ranks (plan.h). Written before `plan_ready`.
struct Plan {
  std::uint64_t inline_bytes = 0;        ///< reductions up to this size have payloads with the announcement: one wait
  std::uint64_t inline_root_bytes = 0;   ///< the same limit for reductions whose result one rank gets
  std::uint64_t inline_copy_bytes = 0;   ///< the same limit for operations that only move data
  std::uint64_t cross_reduce_bytes = 0;  ///< reductions read peers' memory through the kernel from this size on
  std::uint64_t cross_copy_bytes = 0;    ///< the same limit for operations that only move data
  std::uint64_t staged_copy_bytes = kNever;  ///< from this size on, broadcasts and gathers are staged all the same
  std::uint64_t chunk_bytes = 0;             ///< size of the chunks of staged operations
  std::uint32_t zero_copy = 1;               ///< registered memory is read in place
  std::uint32_t stores = 0;                  ///< StorePolicy
};

struct Header {
  static constexpr std::uint64_t kMagic = 0x36304c4f43484f43;  // "COHCOL06"
  std::uint64_t magic;
  std::uint64_t id;  ///< random number of this world, not 0; distinguishes worlds in status pages
  std::uint32_t ranks;
  std::uint32_t chunk_bytes;
  Plan plan;
  std::atomic<std::uint32_t> plan_ready;
  AbortRecord abort;
  alignas(kApart) std::atomic<std::uint32_t> bell;  ///< word on which ranks that wait long sleep
  alignas(kApart) std::atomic<std::uint32_t> sleepers;
  alignas(kApart) std::atomic<std::int64_t> join_tickets;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// Layout of the control memory: the header, the rank states, the payloads of the slots, each rank's staging buffers
/// (two for its inputs, two for its reduced results), and the rings of send and recv.
class ControlLayout {
 public:
  explicit ControlLayout(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  /// The largest size of a chunk.
  std::size_t chunk_bytes() const noexcept { return ranks_ <= 8 ? std::size_t{256} << 10 : std::size_t{64} << 10; }
  /// The best size of a chunk. With it, the chunks in use stay in the caches of a core, even if it runs several ranks.
  std::size_t usual_chunk_bytes() const noexcept { return std::min(chunk_bytes(), std::size_t{128} << 10); }
  /// Size of a slot's payload memory, which is the largest value of `Plan::inline_bytes`.
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
