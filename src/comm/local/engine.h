// Runs one collective after the other over shared memory. Every operation begins with all ranks publishing what they
// bring and reading what all others bring: disagreement is refused by all of them before any result is delivered. Then
//   beside     the payloads lie beside the announcements and everyone takes what it needs: one wait
//   zero-copy  registered memory is read (and for reductions written) in place by all ranks
//   cross      other memory is read through the kernel (cross-memory attach), once
//   staged     other memory goes through double buffers in the control memory, chunk by chunk
// The plan (plan.h) says which; all give the same bits. One thread at a time runs operations; `abort` may come from any
// thread. After a failure other than Mismatch the world has ended and every further operation fails with the first
// cause.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/control/agreement.h"
#include "comm/control/operation.h"
#include "comm/finite_check.h"
#include "comm/kernels/copy.h"
#include "comm/kernels/fold.h"
#include "comm/local/control.h"
#include "comm/local/distance.h"
#include "comm/local/mesh.h"
#include "comm/local/protocol.h"
#include "comm/local/slices.h"
#include "comm/local/waiting.h"
#include "comm/local/world.h"

#include <cohort/error.h>
#include <cohort/observer.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::local {

class Engine final : public Waiter {
 public:
  /// Waits until all ranks have come to the world, and measures.
  Engine(World& world, Waiters& waiters, const FormOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // An operation in steps, so that the caller may start one that others are late for and go on:
  /// Publishes what this rank brings. Throws what ended the world.
  void announce(const Request& request);
  /// True once all ranks have announced; false if that takes longer than about `patience`, for all of which the caller
  /// keeps its core.
  bool await_peers(std::chrono::microseconds patience);
  /// The same until `limit`, sleeping when it takes long. Throws what ends the world meanwhile.
  bool await_peers(std::chrono::steady_clock::time_point limit);
  /// The rest. Throws Mismatch (and the engine may be used again) or what ended the world. `event`, if any, gets
  /// sequence, waiting time and whether staging copies were needed.
  void complete(const Request& request, CollectiveEvent* event);
  /// What the deadline of the operation counts from; unset until waiting gets long.
  void called_at(std::chrono::steady_clock::time_point called, std::chrono::milliseconds timeout) noexcept {
    set_deadline(called, timeout);
  }

  /// Serves the others' operations until all ranks have joined; `patience` is for each of them.
  int join(std::chrono::milliseconds patience);
  /// Any thread. The first reason of all ranks stays.
  void abort(std::string_view reason) noexcept;

  // Parts of an operation of a larger world, which its ranks on this host carry out here, all the same in the same
  // order. They say once what they bring (`meet`), and no part is negotiated (engine_parts.cpp):
  /// From now on waiting is for that world: `waiters` wait, and `meanwhile` is called at least every 2 ms.
  void serve_larger(Waiters& waiters, std::function<void()> meanwhile);
  /// All ranks learn what the others bring. `request` null: the rank has joined. `beside`: there is no input, or it is
  /// one of a reduction and has room beside the announcement, for `fold_beside`. Valid until the next call.
  const Agreement& meet(const Descriptor& own, const Request* request, bool beside);
  bool has_room_beside(std::size_t bytes) const noexcept { return bytes <= layout().payload_bytes(); }
  /// Rank 0, to `part.output`: what all brought beside their announcements.
  void fold_beside(const Request& part);
  /// From rank 0 to all.
  void hand_out(void* data, std::size_t bytes);
  /// A reduce_scatter_v. `begin`: it is of the operation's inputs from this element on; else of other memory.
  void reduce_scatter_part(const Request& part, std::optional<std::int64_t> begin);
  /// An all_gather_v. Gives what `wait_until_read` has to be asked for before the input is written again; 0: nothing.
  std::uint64_t all_gather_part(const Request& part);
  void wait_until_read(std::uint64_t number);
  /// Any other operation, in which memory may lie anywhere.
  void run_part(const Request& part);
  /// What waiting took since the last call.
  using Waiter::take_waited;

  /// True if the operation, once all ranks have come, takes no more than a few times as long as waking a thread for it
  /// (20 us on virtual machines, and the thread then takes a core from whoever computes).
  static bool is_quick(const Request& request) noexcept { return request.payload() <= kQuickBytes; }

 private:
  static constexpr std::size_t kQuickBytes = std::size_t{256} << 10;
  using CounterOf = Counter RankState::*;
  enum class Path { Beside, ZeroCopy, ByOutput, Cross, Staged };

  /// Bytes of rank `source`'s input that rank `target` receives: where they lie there and go here.
  struct Block {
    std::size_t from = 0;
    std::size_t to = 0;
    std::size_t bytes = 0;
  };

  /// What goes through a staging buffer at once.
  struct Chunk {
    std::int64_t begin = 0;  // in elements, of the request's buffers
    std::int64_t count = 0;
    std::uint64_t number = 0;  // by its parity, the buffer
  };

  /// The ranks' counters, as protocol.h wants them.
  struct Counters {
    using State = RankState;
    Engine& engine;
    void wait(CounterOf counter, std::uint64_t number) const { engine.wait_for_counters(counter, number); }
    void post(CounterOf counter, std::uint64_t number) const noexcept { engine.post(counter, number); }
    void skip(CounterOf counter, std::uint64_t number) const noexcept {
      (engine.state(engine.rank_).*counter).value.store(number, std::memory_order_relaxed);
    }
  };

  /// The same where rank 0 alone stages.
  struct FirstsCounters;

  // engine.cpp: rounds and how they fail
  bool brings(const Request& request) const noexcept;
  bool has_room_for_counts() const noexcept {
    return 2 * static_cast<std::size_t>(size_) * sizeof(std::int64_t) <= layout().payload_bytes();
  }
  void check_room_for_counts() const;
  void note_counts(const Counts& counts) noexcept;
  void publish(const Request* beside);
  Slot& own_slot() const noexcept { return state(rank_).slots[sequence_ % 2]; }
  bool has_announced(int rank) const noexcept { return stands(state(rank).slots[sequence_ % 2].sequence, sequence_); }
  void note_memory(Descriptor& own, const Request& request) const;
  void size_up(const Request& request) noexcept;
  void gather();
  std::optional<Disagreement> disagreement() const;
  std::optional<Disagreement> compare_counts() const;
  std::string doing() const override;
  std::uint64_t number() const noexcept override {
    return world_.label() != nullptr ? world_.label()->number() : sequence_;
  }
  std::string omission(int rank) const override;
  void meanwhile() override {
    world_.mesh()->flush();
    if (meanwhile_) meanwhile_();
  }
  void note_cores();
  void run_alone(const Request& request);

  // engine_paths.cpp: which way an operation goes, and reaching other ranks' memory
  void execute(const Request& request, CollectiveEvent* event);
  Path choose(const Request& request) const;
  void measure_again();
  bool exchanges(const Request& request) const noexcept;
  bool inputs_mapped() const noexcept;
  bool outputs_mapped() const noexcept;
  bool mapped(int rank) const noexcept { return round_.brought[static_cast<std::size_t>(rank)].input_segment != 0; }
  const std::byte* payload_of(int rank) const noexcept;
  std::byte* remote(int rank, const Location& location, std::size_t bytes);
  const std::byte* input_of(int rank, const Request& request);
  std::byte* output_of(int rank, const Request& request);
  const std::byte* fetch(int rank, const Location& location, std::size_t offset, std::size_t bytes, std::byte* scratch);
  void pull(int rank, const Location& location, std::size_t offset, std::size_t bytes, std::byte* to);
  void read_peer(int rank, void* to, std::uint64_t address, std::size_t bytes);
  Stores stores_for(std::size_t bytes) const noexcept;
  std::byte* scratch_of(int rank) noexcept {
    return scratch_.empty() ? nullptr : scratch_.data() + static_cast<std::size_t>(rank) * scratch_bytes_;
  }
  void copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes);
  void post(CounterOf counter, std::uint64_t value) noexcept;
  void wait_for_counters(CounterOf counter, std::uint64_t target);
  void finish_round();
  void report_finite(FiniteCheck& finite_check) const noexcept;

  // engine_reductions.cpp
  void set_members(const Request& request);
  Slice part(const Request& request, int rank) const noexcept;
  FoldJob job(const Request& request, std::int64_t count) noexcept;
  void fold_pieces(const Request& request, std::int64_t count, Stores stores = Stores::Cached);
  void all_reduce_beside(const Request& request);
  void all_reduce_zero_copy(const Request& request, Stores stores = Stores::Cached);
  void all_reduce_by_output(const Request& request);
  void all_reduce_cross(const Request& request);
  void reduce_exchanged(const Request& request);
  void reduce_staged(const Request& request, Path path);
  void copy_in(const Request& request, Path path, const Chunk& chunk);
  void fold_own(const Request& request, Path path, const Chunk& chunk);
  void copy_out(const Request& request, const Chunk& chunk);
  void reduce_scatter_beside(const Request& request);
  void reduce_scatter_direct(const Request& request);
  void reduce_scatter_staged(const Request& request);

  // engine_parts.cpp
  void begin_part(const Request& part);
  void check_reads() const {
    if (world_.ended_before_reads()) throw_if_ended();
  }

  // engine_moves.cpp
  Block block(const Request& request, int source, int target) const;
  std::size_t largest_block(const Request& request) const;
  void move_beside(const Request& request);
  void move_direct(const Request& request);
  void move_staged(const Request& request);

  Header& header() const noexcept { return world_.header(); }
  RankState& state(int rank) const noexcept { return world_.state(rank); }
  const ControlLayout& layout() const noexcept { return world_.layout(); }

  const int rank_;
  const int size_;
  Plan plan_;  // rank 0's
  Distance distance_;

  // Of the running operation.
  std::uint64_t sequence_ = 0;
  std::uint64_t measured_at_ = 0;
  std::uint64_t chunks_ = 0;  // staged chunks of all operations before it
  Agreement round_;
  bool serving_ = false;      // this rank has joined
  bool small_ = false;        // payloads lie beside the announcements,
  bool tiny_ = false;         // in the announcement's own line
  std::vector<int> members_;  // ranks that are folded, ascending; kept, so that operations do not allocate
  std::vector<double> scales_;
  std::vector<double> weights_;
  Weighting weighting_;
  std::vector<const void*> fold_inputs_;
  std::vector<void*> fold_outputs_;
  std::int64_t divisor_ = 0;
  std::vector<Location> inputs_;  // by rank, of the larger world's operation
  bool inputs_known_ = false;
  std::function<void()> meanwhile_;  // of the larger world
  bool non_finite_ = false;          // a result of this rank was, and somebody asks for it
  std::vector<std::byte> scratch_;   // for what is read through the kernel: one piece for each peer
  std::size_t scratch_bytes_ = 0;    // of a piece
};

}  // namespace cohort::comm::local
