// Context, the base of the algorithms on one host, and Waiter, with which ranks wait for peers. Both belong to the
// thread that runs operations.
#pragma once

#include "base/thread.h"
#include "comm/api/communicator_impl.h"
#include "comm/engine/agreement.h"
#include "comm/engine/pending_work.h"
#include "comm/kernels/arrays.h"
#include "comm/shm/control.h"
#include "comm/shm/plan.h"
#include "comm/shm/protocol.h"
#include "comm/shm/rendezvous.h"
#include "comm/shm/world.h"
#include "telemetry/status_page.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::comm::local {

// Waiting for peers. A rank spins while there is a core for every rank and a thread waits for the result; it yields
// without spinning if there are more ranks than cores. If the wait takes longer, the rank sleeps on the world's bell,
// in slices; between them it checks deadlines and whether the peers live.

/// Chooses the next step of a wait.
class Pacer {
 public:
  enum class Step { Spin, Yield, Sleep };
  static constexpr auto kSlice = std::chrono::milliseconds(10);
  static constexpr auto kFirstSlice = std::chrono::microseconds(50);

  /// `spins` is the number of spins before yielding; it adapts from wait to wait.
  Pacer(bool crowded, const Waiters& waiters, int& spins) noexcept
      : crowded_(crowded), waiters_(waiters), spins_(spins) {}

  /// Adapts `spins`; called at the end of a wait. Ranks may share a core although there are enough cores (other
  /// programs run too). Then the peer runs only when this rank yields, so spinning before that loses time.
  void arrived() noexcept {
    if (yields_ == 0) spins_ = std::min(spins_ * 2, kMostSpins);
    if (yields_ == 1 || yields_ == 2) spins_ = std::max(spins_ / 2, kLeastSpins);
  }
  static constexpr int kMostSpins = 2000;

  /// Duration of the wait so far, without the spinning.
  std::chrono::nanoseconds waited() const noexcept {
    return yielding_ ? Clock::now() - since_ : std::chrono::nanoseconds(0);
  }

  Step next() noexcept {
    ++steps_;
    // If no thread waits for the result, the core is left to threads that compute.
    if (waiters_.attended.load(std::memory_order_relaxed) == 0 && !waiters_.in_caller.load(std::memory_order_relaxed)) {
      return steps_ <= kUnattendedSpins ? Step::Spin : Step::Sleep;
    }
    if (!crowded_ && steps_ <= spins_) return Step::Spin;
    if (!yielding_) {
      yielding_ = true;
      since_ = Clock::now();
    } else if (Clock::now() - since_ > (crowded_ ? kYieldingInCrowd : kYielding)) {
      return Step::Sleep;
    }
    ++yields_;
    return Step::Yield;
  }
  /// True once per interval, when the peers should be checked.
  bool look_now() noexcept {
    const auto now = Clock::now();
    if (now - looked_ < kLook) return false;
    looked_ = now;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kLeastSpins = 30;
  static constexpr int kUnattendedSpins = 100;
  static constexpr auto kYielding = std::chrono::microseconds(200);
  // This is short, since a rank that only yields gets the same share of a core as one that computes.
  static constexpr auto kYieldingInCrowd = std::chrono::microseconds(50);
  static constexpr auto kLook = std::chrono::milliseconds(20);

  const bool crowded_;
  const Waiters& waiters_;
  int& spins_;
  int steps_ = 0;
  int yields_ = 0;
  bool yielding_ = false;
  Clock::time_point since_{};
  Clock::time_point looked_{};
};

/// Counts a rank among the sleepers for its lifetime, after `count`, and reports whether the rank's program waits.
class Sleeping {
 public:
  explicit Sleeping(status::LaneStatus& lane) noexcept : lane_(lane) {}
  ~Sleeping() {
    if (header_ == nullptr) return;
    header_->sleepers.fetch_sub(1);
    lane_.waiting.store(0, std::memory_order_relaxed);
  }
  Sleeping(const Sleeping&) = delete;
  Sleeping& operator=(const Sleeping&) = delete;
  bool counted() const noexcept { return header_ != nullptr; }
  void count(Header& header, bool awaited) noexcept {
    if (header_ == nullptr) header.sleepers.fetch_add(1);
    header_ = &header;
    lane_.waiting.store(awaited ? 1 : 0, std::memory_order_relaxed);
  }

 private:
  status::LaneStatus& lane_;
  Header* header_ = nullptr;
};

class Waiter {
 public:
  using Clock = std::chrono::steady_clock;

  Waiter(World& its_world, Waiters& waiters) : world(its_world), waiters_(&waiters) {}

  World& world;
  std::uint64_t sequence = 0;  ///< number of the running operation

  /// Blocks until `ready()` is true. It must not become false again. `missing()` returns the ranks that are waited for.
  /// Returns false at about `limit`, if `ready()` is still false.
  template <class Ready, class Missing>
  bool wait_until(Ready ready, Missing missing, Clock::time_point limit = Clock::time_point::max());
  /// Blocks until `reached(rank)` is true for every rank, with the same conditions and result as `wait_until`.
  template <class Reached>
  bool wait_for_all(Reached reached, Clock::time_point limit = Clock::time_point::max());
  /// Like `wait_for_all`, but does not sleep. Returns false after about `patience` of waiting.
  template <class Reached>
  bool wait_a_while_for_all(Reached reached, std::chrono::microseconds patience);

  void throw_if_ended() const {
    if (world.ended()) throw world.recorded(doing(), number());
  }
  /// Throws the error that ended the world, for `what`, an operation that has not begun; uses its number to come.
  [[noreturn]] void throw_ended_before(const std::string& what) const;
  /// Checks on the other ranks, for an operation that is carried out elsewhere.
  void attend();
  Deadline& deadline() const noexcept { return waiters_->deadline; }
  [[noreturn]] void end_lost(int rank, const std::string& how);
  [[noreturn]] void end_world(ErrorCode code, int peer, const std::string& text);
  /// Describes the running operation for messages: "all_reduce(float32[10], sum)". In a part of a larger world,
  /// describes the larger world's operation.
  std::string doing() const;

  /// Makes this Waiter serve a larger world: uses its `waiters` from now on, and calls `meanwhile` at least every 2 ms
  /// in a wait that takes long.
  void serve(Waiters& waiters, std::function<void()> meanwhile);
  /// Returns the time spent waiting since the last call of this function, without spinning.
  std::chrono::nanoseconds take_waited() noexcept { return std::exchange(waited_, std::chrono::nanoseconds(0)); }
  /// Status in which this rank reports the operation in which it waits.
  status::LaneStatus& lane() const noexcept { return world.collectives(); }

 protected:
  ~Waiter() = default;

 private:
  void meanwhile() {
    world.mesh()->flush();
    if (meanwhile_) meanwhile_();
  }
  void note_waiting(std::chrono::nanoseconds waited) noexcept {
    if (waited.count() > 0) lane().note_wait(static_cast<std::uint64_t>(waited.count()));
    waited_ += waited;
  }
  void look_after(const std::function<std::vector<int>()>& missing);
  std::uint64_t number() const noexcept { return world.label() != nullptr ? world.label()->number() : sequence; }
  RunningOperation running() const { return {doing(), number(), world.name(world.rank()), world.host()}; }
  std::string omission(int rank) const;

  Waiters* waiters_;
  std::function<void()> meanwhile_;
  std::chrono::milliseconds slice_ = Pacer::kSlice;  // the longest sleep between two calls of `meanwhile`
  std::chrono::nanoseconds waited_{0};
  Clock::time_point attended_{};
  int spins_ = Pacer::kMostSpins;  // number of spins before yielding; adapts
};

template <class Ready, class Missing>
bool Waiter::wait_until(Ready ready, Missing missing, Clock::time_point limit) {
  if (!ready()) {
    Pacer pacer(world.crowded(), *waiters_, spins_);
    Sleeping sleeping(lane());
    while (!ready()) {
      if (world.ended()) throw_if_ended();
      switch (pacer.next()) {
        case Pacer::Step::Spin: sys::cpu_relax(); continue;
        case Pacer::Step::Yield:
          meanwhile();
          ::sched_yield();
          continue;
        case Pacer::Step::Sleep: break;
      }
      auto longest = std::chrono::nanoseconds(slice_);
      if (limit != Clock::time_point::max()) {
        longest = std::min<std::chrono::nanoseconds>(longest, limit - Clock::now());
        if (longest.count() <= 0) return false;
      }
      meanwhile();
      // A peer may post without seeing that this rank sleeps, if both happen within nanoseconds. So the first sleep is
      // short, and no store needs a fence.
      Header& shared = world.header();
      const std::uint32_t bell = shared.bell.load();
      const bool first = !sleeping.counted();
      const bool own = waiters_->in_caller.load(std::memory_order_relaxed) && !sys::in_service_thread();
      sleeping.count(shared, own || waiters_->awaited.load(std::memory_order_relaxed) != 0);
      if (first) longest = std::min<std::chrono::nanoseconds>(longest, Pacer::kFirstSlice);
      if (!ready() && !world.ended()) sys::futex_wait(shared.bell, bell, longest);
      if (!pacer.look_now() || ready()) continue;
      look_after(missing);
    }
    pacer.arrived();
    note_waiting(pacer.waited());
  }
  return true;
}

template <class Reached>
bool Waiter::wait_for_all(Reached reached, Clock::time_point limit) {
  int next = 0;  // `reached` is true for all ranks before this one
  return wait_until(
      [&] {
        while (next < world.size() && reached(next)) ++next;
        return next == world.size();
      },
      [&] {
        std::vector<int> missing;
        for (int rank = next; rank < world.size(); ++rank) {
          if (!reached(rank)) missing.push_back(rank);
        }
        return missing;
      },
      limit);
}

template <class Reached>
bool Waiter::wait_a_while_for_all(Reached reached, std::chrono::microseconds patience) {
  int next = 0;
  const auto all = [&] {
    while (next < world.size() && reached(next)) ++next;
    return next == world.size();
  };
  if (!all()) {
    Pacer pacer(world.crowded(), *waiters_, spins_);
    Clock::time_point since{};
    for (int steps = 1; !all(); ++steps) {
      if (world.ended()) throw_if_ended();
      const Pacer::Step step = pacer.next();
      if (step == Pacer::Step::Sleep) return false;
      if (step == Pacer::Step::Yield || steps % 64 == 0) {
        meanwhile();
        const auto now = Clock::now();
        if (since == Clock::time_point{}) since = now;
        if (now - since > patience) return false;
      }
      if (step == Pacer::Step::Yield) {
        ::sched_yield();
      } else {
        sys::cpu_relax();
      }
    }
    pacer.arrived();
    note_waiting(pacer.waited());
  }
  return true;
}

// Base of the algorithms on one host: the ranks' descriptions of an operation, their slots, counters and buffers in the
// control memory, memory of peers, and waiting for peers. Rounds (moves.cpp) fill in the descriptions. An algorithm is
// a function over the Context (algorithms.h); all ranks run it and do their part. Belongs to the thread that runs
// operations.
class Context final : public Waiter {
 public:
  using State = RankState;  // used by protocol.h
  using CounterOf = Counter RankState::*;

  /// Blocks until all ranks have formed their Context, measures, and gets the plan.
  Context(World& world, Waiters& waiters, const FormOptions& options);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const int rank;
  const int size;
  const ControlLayout& layout;
  Plan plan;  ///< the plan that rank 0 made
  Distance distance;

  // The next members are the state of the running operation.
  Agreement agreement;        ///< all ranks' descriptions, and the decision
  bool serving = false;       ///< this rank has joined, and does its part without input and output
  bool is_inline = false;     ///< payloads come with the descriptors
  bool is_tiny = false;       ///< inline payloads are in the slots themselves
  bool non_finite = false;    ///< a check was requested, and this rank has made a result that is not finite
  Contributors contributors;  ///< the ranks that a reduction folds
  std::uint64_t chunks = 0;   ///< number of chunks that have used the buffers so far, in all operations
  /// Locations of the inputs by rank, for an operation of a larger world (algorithms.h); empty if not known.
  std::vector<Location> inputs;

  // --- descriptors ---

  RankState& state(int which) const noexcept { return world.state(which); }
  Slot& slot(int which) const noexcept { return state(which).slots[sequence % 2]; }
  bool has_announced(int which) const noexcept { return stands(slot(which).sequence, sequence); }
  const Descriptor& brought(int which) const noexcept { return agreement.of(which); }
  /// True for a reduction whose result only one rank gets.
  bool is_rooted() const noexcept { return agreement.agreed.kind == Kind::Reduce; }
  bool gets_result(int which) const noexcept { return !is_rooted() || which == agreement.root; }

  // --- the ranks' counters: a rank that has waited for a post may read what was written before the post ---

  void post(CounterOf counter, std::uint64_t number) noexcept {
    if (non_finite) state(rank).non_finite[sequence % 2].store(sequence, std::memory_order_relaxed);
    publish((state(rank).*counter).value, number);
    world.ring();
  }
  void skip(CounterOf counter, std::uint64_t number) noexcept { publish((state(rank).*counter).value, number); }
  void wait(CounterOf counter, std::uint64_t number) {
    wait_for_all([&](int which) { return reached((state(which).*counter).value, number); });
  }
  /// Blocks until all ranks have come here in this operation.
  void meet_at(CounterOf counter) {
    post(counter, sequence);
    wait(counter, sequence);
  }
  /// Blocks until all ranks have read and written what they need.
  void finish_round() { meet_at(&RankState::finished); }

  // --- buffers in the control memory ---

  /// Memory for a rank's inline payload in this operation.
  std::byte* payload(int which) const noexcept { return layout.payload(world.control(), which, sequence); }
  bool has_room_inline(std::size_t bytes) const noexcept { return bytes <= layout.payload_bytes(); }
  const std::byte* inline_input(int which) const noexcept { return is_tiny ? slot(which).tiny : payload(which); }
  std::byte* staging(int which, std::uint64_t number) const noexcept {
    return layout.staging(world.control(), which, number);
  }
  std::byte* results(int which, std::uint64_t number) const noexcept {
    return layout.results(world.control(), which, number);
  }
  /// Takes the numbers of the next `count` chunks, the same on all ranks.
  Chunks next_chunks(std::uint64_t count) noexcept {
    return {.base = std::exchange(chunks, chunks + count), .count = count};
  }
  /// The kind of stores for a buffer that a peer reads next.
  Stores stores_for(std::size_t bytes) const noexcept;
  /// In some operations, measures again which stores are best, since that changes. All ranks call `measure_again` after
  /// all have come to the operation, and before any rank stages data.
  void measure_again();

  // --- memory of ranks (registered memory of peers is read in place, other memory through the kernel) ---

  bool mapped(int which) const noexcept { return brought(which).input_segment != 0; }
  bool inputs_mapped() const noexcept;
  bool outputs_mapped() const noexcept;
  /// Addresses of a rank's input or output in registered memory.
  const std::byte* input_of(int which, const Request& request);
  std::byte* output_of(int which, const Request& request);
  std::byte* remote(int which, const Location& location, std::size_t bytes);
  /// Returns an address at which [offset, offset + bytes) of a peer's memory can be read, either in place or in a copy
  /// that stays valid until the next call for this peer. `bytes` is at most kPullPiece or a rank's slice of a chunk.
  const std::byte* fetch(int which, const Location& location, std::size_t offset, std::size_t bytes);
  /// Copies any number of bytes of a peer's memory to `to`.
  void pull(int which, const Location& location, std::size_t offset, std::size_t bytes, std::byte* to);
  /// Copies this rank's own memory, and checks between pieces whether the world has ended.
  void copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes);
  /// Throws if the world had ended when this rank read its peers' memory, since the data may be invalid then.
  void check_reads() const {
    if (world.ended_before_reads()) throw_if_ended();
  }

  // The next members are arguments of folds (reductions.cpp), kept so that operations do not allocate.
  std::vector<const void*> fold_inputs;
  std::vector<void*> fold_outputs;

 private:
  void note_cores();
  void read_peer(int which, void* to, std::uint64_t address, std::size_t bytes);

  std::vector<std::byte> aside_;  // memory for data read through the kernel, a piece for each peer
  std::size_t aside_bytes_ = 0;   // size of such a piece
};

/// Size of the pieces of a copy or fold between which this rank checks whether the world has ended.
inline constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

}  // namespace cohort::comm::local
