// The memory through which the ranks of one host agree: one segment, made by rank 0 and mapped by all. Every word
// has one writer (its rank), but for the header's abort record, bell and tickets. Counters only grow. Plain layout
// without pointers; the engine holds the rules.
#pragma once

#include <cohort/dtype.h>
#include <cohort/error.h>

#include "sys/peer_process.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace cohort::comm::local {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

enum class Kind : std::uint8_t { None = 0, AllReduce, ReduceScatter, AllGather, Broadcast, Barrier, Joined };

/// Memory that peers can map: segment 0 is any other memory.
struct Location {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

/// What a rank brings to an operation; all ranks read all of them before any result is delivered.
struct Descriptor {
  Kind kind = Kind::None;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::uint8_t weighted = 0;
  std::int32_t root = 0;
  std::int64_t count = 0;  ///< elements of the smaller buffer; of Joined, its ticket
  double weight = 0;
  std::uint32_t input_segment = 0;
  std::uint32_t output_segment = 0;
  std::uint64_t input_offset = 0;
  std::uint64_t output_offset = 0;
  std::uint64_t announcements = 0;  ///< messages about segments that the rank has sent to each peer so far

  Location input() const noexcept { return {input_segment, input_offset}; }
  Location output() const noexcept { return {output_segment, output_offset}; }
};
static_assert(sizeof(Descriptor) == kLine - sizeof(std::uint64_t));

inline constexpr std::size_t kSlotPayload = 8128;

/// An operation's announcement and its payload if that is small. There are two, by the parity of the sequence: a rank
/// writes one again only after all ranks have come to the operation between, and so have left the one before.
struct alignas(kLine) Slot {
  std::atomic<std::uint64_t> sequence;  ///< of the descriptor below; stored last, with release
  Descriptor descriptor;
  std::byte payload[kSlotPayload];
};
static_assert(sizeof(Slot) == 8192 && offsetof(Slot, payload) == kLine);

struct alignas(kLine) Counter {
  std::atomic<std::uint64_t> value;
};

struct alignas(kLine) RankState {
  Counter staged;    ///< chunks that this rank has copied into its staging buffers
  Counter reduced;   ///< chunks from whose inputs this rank has read all it needs
  Counter copied;    ///< chunks whose results this rank has copied out
  Counter finished;  ///< sequence of the last zero-copy operation in which this rank has read and written everything
  alignas(kLine) std::atomic<std::uint32_t> ready;  ///< has mapped this memory
  std::atomic<std::uint32_t> left;                  ///< its communicator was destroyed
  std::atomic<std::uint64_t> begun;                 ///< sequence of the last operation that it came to
  sys::CoreSet cores;                               ///< written before `ready`
  Slot slots[2];
};

/// Why the world ended. Written once, by whoever changes `state` from kNone to kWriting.
struct AbortRecord {
  static constexpr std::uint32_t kNone = 0, kWriting = 1, kSet = 2;
  alignas(kLine) std::atomic<std::uint32_t> state;
  ErrorCode code;
  std::int32_t reporter;
  std::int32_t peer;
  std::uint64_t sequence;
  char text[1024];
};

struct Header {
  static constexpr std::uint64_t kMagic = 0x31304c4f43484f43;  // "COHCOL01"
  std::uint64_t magic;
  std::uint32_t ranks;
  std::uint32_t chunk_bytes;
  AbortRecord abort;
  alignas(kLine) std::atomic<std::uint32_t> bell;  ///< ranks that wait long sleep on it
  alignas(kLine) std::atomic<std::uint32_t> sleepers;
  alignas(kLine) std::atomic<std::int64_t> join_tickets;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// Header, rank states, then each rank's staging buffers: two for what it brings, two for what it has reduced.
class ControlLayout {
 public:
  explicit ControlLayout(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  std::size_t chunk_bytes() const noexcept { return ranks_ <= 8 ? std::size_t{256} << 10 : std::size_t{64} << 10; }
  std::size_t bytes() const noexcept { return staging_offset() + ranks_ * 4 * chunk_bytes(); }
  /// A payload up to this size goes through the slots: every rank folds all of it.
  std::size_t inline_bytes() const noexcept { return std::min(kSlotPayload, (std::size_t{64} << 10) / ranks_); }

  static Header& header(void* base) noexcept { return *static_cast<Header*>(base); }
  RankState& state(void* base, int rank) const noexcept {
    return *reinterpret_cast<RankState*>(static_cast<std::byte*>(base) + states_offset() +
                                         static_cast<std::size_t>(rank) * sizeof(RankState));
  }
  std::byte* staging(void* base, int rank, std::uint64_t chunk) const noexcept { return buffer(base, rank, chunk % 2); }
  std::byte* results(void* base, int rank, std::uint64_t chunk) const noexcept {
    return buffer(base, rank, 2 + chunk % 2);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t states_offset() noexcept { return (sizeof(Header) + kPage - 1) / kPage * kPage; }
  std::size_t staging_offset() const noexcept {
    return (states_offset() + ranks_ * sizeof(RankState) + kPage - 1) / kPage * kPage;
  }
  std::byte* buffer(void* base, int rank, std::uint64_t index) const noexcept {
    return static_cast<std::byte*>(base) + staging_offset() +
           (static_cast<std::size_t>(rank) * 4 + static_cast<std::size_t>(index)) * chunk_bytes();
  }
  std::size_t ranks_;
};

}  // namespace cohort::comm::local
