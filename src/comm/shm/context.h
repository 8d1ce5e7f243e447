// Base of the algorithms on one host (Context), and how ranks wait for peers (Waiter). Both belong to the thread that
// runs operations.
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

// How ranks wait for peers: spinning while there is a core for every rank and somebody waits for the result, yielding
// at once where ranks are more numerous than cores, and sleeping on the world's bell when it takes longer, in slices
// between which deadlines and the peers' lives are looked after. A Waiter belongs to the thread that runs operations.

/// Decides what the next step of waiting is.
class Pacer {
 public:
  enum class Step { Spin, Yield, Sleep };
  static constexpr auto kSlice = std::chrono::milliseconds(10);
  static constexpr auto kFirstSlice = std::chrono::microseconds(50);

  /// `spins` is how long spinning has paid so far; it is kept from wait to wait.
  Pacer(bool crowded, const Waiters& waiters, int& spins) noexcept
      : crowded_(crowded), waiters_(waiters), spins_(spins) {}

  /// Has to be called when what was waited for has come. Ranks may share a core although there are enough of them
  /// (other programs run too): then the peer comes only when this one yields, and spinning before that is lost time.
  void arrived() noexcept {
    if (yields_ == 0) spins_ = std::min(spins_ * 2, kMostSpins);
    if (yields_ == 1 || yields_ == 2) spins_ = std::max(spins_ / 2, kLeastSpins);
  }
  static constexpr int kMostSpins = 2000;

  /// How long it has been waiting, without the spinning.
  std::chrono::nanoseconds waited() const noexcept {
    return yielding_ ? Clock::now() - since_ : std::chrono::nanoseconds(0);
  }

  Step next() noexcept {
    ++steps_;
    // Nobody waits for the result: the core belongs to threads that compute.
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
  /// True once per interval in which the peers should be looked after.
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
  // A rank that yields all the time gets the same share of a core as one that computes.
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

/// Counts a rank among the sleepers while it lives, and says whether its program waits.
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
  std::uint64_t sequence = 0;  ///< of the running operation

  /// Waits until `ready()` is true; it must not become false again. `missing()` gives the ranks that are waited for.
  /// False if that takes until (about) `limit`.
  template <class Ready, class Missing>
  bool wait_until(Ready ready, Missing missing, Clock::time_point limit = Clock::time_point::max());
  /// Waits until `reached(rank)` is true of every rank; it must not become false again. False as above.
  template <class Reached>
  bool wait_for_all(Reached reached, Clock::time_point limit = Clock::time_point::max());
  /// The same, but gives up and returns false after about `patience` of waiting.
  template <class Reached>
  bool wait_a_while_for_all(Reached reached, std::chrono::microseconds patience);

  void throw_if_ended() const {
    if (world.ended()) throw world.recorded(doing(), number());
  }
  /// For an operation that has not begun: it is the one that fails, under the number that it would have.
  [[noreturn]] void throw_ended_before(const std::string& what) const;
  /// Looks after the others once, for an operation that is carried out elsewhere.
  void attend();
  Deadline& deadline() const noexcept { return waiters_->deadline; }
  [[noreturn]] void end_lost(int rank, const std::string& how);
  [[noreturn]] void end_world(ErrorCode code, int peer, const std::string& text);
  /// Describes what is under way, for messages: "all_reduce(float32[10], sum)"; in a larger world, its operation.
  std::string doing() const;

  /// Lets `waiters` wait from now on, and `meanwhile` is called at least every 2 ms, however long it takes.
  void serve(Waiters& waiters, std::function<void()> meanwhile);
  /// Time spent waiting since the last call, without spinning.
  std::chrono::nanoseconds take_waited() noexcept { return std::exchange(waited_, std::chrono::nanoseconds(0)); }
  /// Status in which this rank reports what it waits for.
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
  int spins_ = Pacer::kMostSpins;  // how long to spin before yielding; adapts
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
      // A rank that posted without seeing this one among the sleepers has had its store on the way for no more than
      // nanoseconds: so the first sleep is short, and no store needs a fence.
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
  int next = 0;  // the ranks before have reached it
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

// Base of the algorithms on one host: members and their contributions, the ranks' slots, counters and buffers in the
// control memory, memory of peers, and waiting for them. Its rounds (moves.cpp) fill in the ranks' contributions; an
// algorithm is a function over it (algorithms.h), in which all ranks do their part. Belongs to the thread that runs
// operations.
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

  // State of the running operation:
  Agreement agreement;        ///< all ranks' contributions
  bool serving = false;       ///< this rank has joined: it does its part, without input and output
  bool is_inline = false;     ///< payloads lie beside the descriptors,
  bool is_tiny = false;       ///< in the descriptor's slot itself
  bool non_finite = false;    ///< a result of this rank was, and somebody asks for it
  Contributors contributors;  ///< of a reduction
  std::uint64_t chunks = 0;   ///< that have been through the buffers so far, of all operations
  /// Locations by rank, of the operation of a larger world that this one is a part of (algorithms.h); empty: not known.
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
  void skip(CounterOf counter, std::uint64_t number) noexcept { publish((state(rank).*counter).value, number); }
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

  /// Memory beside a rank's descriptor.
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
  /// Addresses in registered memory.
  const std::byte* input_of(int which, const Request& request);
  std::byte* output_of(int which, const Request& request);
  std::byte* remote(int which, const Location& location, std::size_t bytes);
  /// Address at which [offset, offset + bytes) of a peer's memory can be read: in place, or aside until the next call
  /// for the peer. Memory aside holds kPullPiece bytes and a rank's slice of a chunk.
  const std::byte* fetch(int which, const Location& location, std::size_t offset, std::size_t bytes);
  /// The same, copied to `to`, however long.
  void pull(int which, const Location& location, std::size_t offset, std::size_t bytes, std::byte* to);
  /// Copies own memory, looking now and then whether the world has ended.
  void copy_pieces(std::byte* to, const std::byte* from, std::size_t bytes);
  /// Throws if the world had ended by the time this rank read its peers' memory: then it may not have been theirs.
  void check_reads() const {
    if (world.ended_before_reads()) throw_if_ended();
  }

  // Arguments of fold_members (reductions.cpp), kept, so that operations do not allocate:
  std::vector<const void*> fold_inputs;
  std::vector<void*> fold_outputs;

 private:
  void note_cores();
  void read_peer(int which, void* to, std::uint64_t address, std::size_t bytes);

  std::vector<std::byte> aside_;  // for what is read through the kernel: a piece for each peer
  std::size_t aside_bytes_ = 0;   // of a piece
};

/// Size of a piece, between which this rank checks whether the world has ended.
inline constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

}  // namespace cohort::comm::local
