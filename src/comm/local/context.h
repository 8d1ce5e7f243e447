// What the algorithms on one host are written over: who takes part and what all brought, the ranks' slots, counters and
// buffers in the control memory, memory of peers, and waiting for them. Its rounds (round.h) fill in what ranks bring;
// an algorithm is a function over it (reductions.h, moves.h, parts.h), in which all ranks do their part. Belongs to the
// thread that runs operations.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/control/agreement.h"
#include "comm/control/contributors.h"
#include "comm/kernels/copy.h"
#include "comm/local/control.h"
#include "comm/local/distance.h"
#include "comm/local/mesh.h"
#include "comm/local/protocol.h"
#include "comm/local/waiting.h"
#include "comm/local/world.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cohort::comm::local {

class Context final : public Waiter {
 public:
  using State = RankState;  // for protocol.h
  using CounterOf = Counter RankState::*;

  /// Waits until all ranks have come to the world, and measures.
  Context(World& world, Waiters& waiters, const FormOptions& options);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const int rank;
  const int size;
  const ControlLayout& layout;
  Plan plan;  ///< rank 0's
  Distance distance;

  // Of the running operation:
  Agreement agreement;        ///< what all ranks brought
  bool serving = false;       ///< this rank has joined: it does its part, and brings and gets nothing
  bool is_inline = false;     ///< payloads lie beside the descriptors,
  bool is_tiny = false;       ///< in the descriptor's slot itself
  bool non_finite = false;    ///< a result of this rank was, and somebody asks for it
  Contributors contributors;  ///< of a reduction
  std::uint64_t chunks = 0;   ///< that have been through the buffers so far, of all operations
  /// By rank, of the operation of a larger world that this one is a part of (parts.h); empty: not known.
  std::vector<Location> inputs;

  // --- descriptors ---

  RankState& state(int which) const noexcept { return world.state(which); }
  Slot& slot(int which) const noexcept { return state(which).slots[sequence % 2]; }
  bool has_announced(int which) const noexcept { return stands(slot(which).sequence, sequence); }
  const Descriptor& brought(int which) const noexcept { return agreement.of(which); }
  /// A reduction whose result one rank gets.
  bool is_rooted() const noexcept { return agreement.agreed.kind == Kind::Reduce; }
  bool gets_result(int which) const noexcept { return !is_rooted() || which == agreement.root; }

  // --- the ranks' counters: what a rank has written before it posts may be read by those who have waited ---

  void post(CounterOf counter, std::uint64_t number) noexcept {
    if (non_finite) state(rank).non_finite[sequence % 2].store(sequence, std::memory_order_relaxed);
    publish((state(rank).*counter).value, number);
    world.ring();
  }
  void skip(CounterOf counter, std::uint64_t number) noexcept {
    (state(rank).*counter).value.store(number, std::memory_order_relaxed);
  }
  void wait(CounterOf counter, std::uint64_t number) {
    wait_for_all([&](int which) { return reached((state(which).*counter).value, number); });
  }
  /// Nobody goes on before all have come here.
  void meet_at(CounterOf counter) {
    post(counter, sequence);
    wait(counter, sequence);
  }
  /// Nobody leaves before all have read and written what they need.
  void finish_round() { meet_at(&RankState::finished); }

  // --- buffers in the control memory ---

  /// Room beside a rank's descriptor.
  std::byte* payload(int which) const noexcept { return layout.payload(world.control(), which, sequence); }
  bool has_room_inline(std::size_t bytes) const noexcept { return bytes <= layout.payload_bytes(); }
  const std::byte* inline_input(int which) const noexcept { return is_tiny ? slot(which).tiny : payload(which); }
  std::byte* staging(int which, std::uint64_t number) const noexcept {
    return layout.staging(world.control(), which, number);
  }
  std::byte* results(int which, std::uint64_t number) const noexcept {
    return layout.results(world.control(), which, number);
  }
  /// The next `count` chunks through them, the same on all ranks.
  Chunks next_chunks(std::uint64_t count) noexcept {
    return {.base = std::exchange(chunks, chunks + count), .count = count};
  }
  /// How buffers that a peer reads next are written.
  Stores stores_for(std::size_t bytes) const noexcept;
  /// How staging is best written changes: measures it again from time to time. To be called by all ranks once all have
  /// come to the operation, before any of them stages something.
  void measure_again();

  // --- memory of ranks; of peers it is read in place where it is registered, else through the kernel ---

  bool mapped(int which) const noexcept { return brought(which).input_segment != 0; }
  bool inputs_mapped() const noexcept;
  bool outputs_mapped() const noexcept;
  /// Of registered memory.
  const std::byte* input_of(int which, const Request& request);
  std::byte* output_of(int which, const Request& request);
  std::byte* remote(int which, const Location& location, std::size_t bytes);
  /// Where [offset, offset + bytes) of a peer's memory can be read: in place, or aside until the next call for the
  /// peer. Aside there is room for kPullPiece bytes and for a rank's slice of a chunk.
  const std::byte* fetch(int which, const Location& location, std::size_t offset, std::size_t bytes);
  /// The same, copied to `to`, however long.
  void pull(int which, const Location& location, std::size_t offset, std::size_t bytes, std::byte* to);
  /// Copies own memory, looking now and then whether the world has ended.
  void copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes);
  /// Throws if the world had ended by the time this rank read its peers' memory: then it may not have been theirs.
  void check_reads() const {
    if (world.ended_before_reads()) throw_if_ended();
  }

  // Of fold_members (folding.h), kept, so that operations do not allocate:
  std::vector<const void*> fold_inputs;
  std::vector<void*> fold_outputs;

 private:
  void note_cores();
  void read_peer(int which, void* to, std::uint64_t address, std::size_t bytes);

  std::vector<std::byte> aside_;  // for what is read through the kernel: a piece for each peer
  std::size_t aside_bytes_ = 0;   // of a piece
};

/// Between pieces of this size it is looked whether the world has ended.
inline constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

}  // namespace cohort::comm::local
