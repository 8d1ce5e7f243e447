// Model tests of protocol.h. Relacy runs it with its own type of words, tries interleavings of the ranks, lets each
// load see every value that the C++ memory model allows, and reports data races in the buffers. Each model also runs
// with faults that Relacy has to find, since a model that cannot fail shows nothing. Wakeups are not modelled, since
// ranks sleep in short slices (context.h).
#include "comm/shm/protocol.h"

#include <array>
#include <cstdio>
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

#include <relacy/relacy.hpp>
// Relacy defines macros named like std::atomic's members and the heap's. protocol.h has templates, so it comes first.
#undef memory_order_relaxed
#undef memory_order_consume
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst
#undef new
#undef delete

namespace cohort::comm::local {
namespace {

enum class Fault { None, RelaxedStores, RelaxedLoads, OneSlot, OneBuffer, NoWaitForReaders, OneCellTooMany, NoFences };
Fault fault = Fault::None;

rl::memory_order modelled(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed: return rl::mo_relaxed;
    case std::memory_order_consume:
    case std::memory_order_acquire: return fault == Fault::RelaxedLoads ? rl::mo_relaxed : rl::mo_acquire;
    case std::memory_order_release: return fault == Fault::RelaxedStores ? rl::mo_relaxed : rl::mo_release;
    case std::memory_order_acq_rel: return rl::mo_acq_rel;
    default: return rl::mo_seq_cst;
  }
}

/// A word of shared memory, with the members of std::atomic that protocol.h uses.
template <class T>
class Word {
 public:
  T load(std::memory_order order = std::memory_order_seq_cst) const { return word_.load(modelled(order), $); }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) { word_.store(value, modelled(order), $); }
  T exchange(T value) { return word_($).exchange(value, rl::mo_seq_cst); }
  bool compare_exchange_strong(T& expected, T value) {
    return word_($).compare_exchange_strong(expected, value, rl::mo_seq_cst);
  }

 private:
  rl::atomic<T> word_;
};

}  // namespace

template <class T>
struct FenceOf<Word<T>> {
  static void set(std::memory_order order) {
    if (fault != Fault::NoFences) rl::atomic_thread_fence(modelled(order), $);
  }
};

namespace {

void wait_a_turn() { rl::yield(1, $); }

/// Memory without synchronization: an access that may race with another access is an error.
class Plain {
 public:
  void write(int value) { value_($) = value; }
  int read() const { return value_($); }

 private:
  rl::var<int> value_;
};

/// Operations of all kinds, one after the other. Each begins with announcements and then moves chunks through buffers.
template <int kRanks>
struct Operations : rl::test_suite<Operations<kRanks>, kRanks> {
  static constexpr int kChunks = 3;
  struct Slot {
    Word<std::uint64_t> sequence;
    Plain payload;
  };
  struct State {
    Word<std::uint64_t> staged, reduced;
    std::array<Slot, 2> slots;
    std::array<Plain, 2> staging, results;
    std::array<Plain, kChunks> borrowed;  // memory of the rank's program that peers read in place
  };
  struct Context {
    using State = Operations::State;
    using Counter = Word<std::uint64_t> State::*;
    std::array<State, kRanks>& states;
    int rank;
    State& own() const { return states[static_cast<std::size_t>(rank)]; }
    void wait(Counter counter, std::uint64_t number) const {
      if (fault == Fault::NoWaitForReaders && counter == &State::reduced) return;
      for (State& state : states) {
        while (!reached(state.*counter, number)) wait_a_turn();
      }
    }
    void post(Counter counter, std::uint64_t number) const { publish(own().*counter, number); }
    void skip(Counter counter, std::uint64_t number) const { publish(own().*counter, number); }
  };

  std::array<State, kRanks> states;

  void before() {
    for (State& state : states) {
      state.staged.store(0);
      state.reduced.store(0);
      for (Slot& slot : state.slots) slot.sequence.store(0);
    }
  }
  static int value(int rank, std::uint64_t sequence, std::uint64_t chunk) {
    return static_cast<int>(sequence) * 100 + rank * 10 + static_cast<int>(chunk);
  }
  static std::size_t buffer(std::uint64_t number) { return fault == Fault::OneBuffer ? 0 : number % 2; }

  void announce(Context& context, std::uint64_t sequence) {
    const std::size_t parity = fault == Fault::OneSlot ? 0 : sequence % 2;
    Slot& own = context.own().slots[parity];
    own.payload.write(value(context.rank, sequence, 0));
    publish(own.sequence, sequence);
    for (int rank = 0; rank < kRanks; ++rank) {
      Slot& slot = states[static_cast<std::size_t>(rank)].slots[parity];
      while (!stands(slot.sequence, sequence)) wait_a_turn();
      RL_ASSERT(slot.payload.read() == value(rank, sequence, 0));
    }
  }
  /// Moves chunks with run_one_ahead. `lends`: peers read rank 0's memory in place, like registered memory.
  void one_ahead(Context& context, std::uint64_t sequence, std::uint64_t base, bool lends) {
    const bool in_place = lends && context.rank == 0;
    for (int i = 0; i < kChunks && in_place; ++i) {
      context.own().borrowed[static_cast<std::size_t>(i)].write(value(0, sequence, static_cast<std::uint64_t>(i)));
    }
    announce(context, sequence);
    run_one_ahead(
        context, {base, kChunks, !in_place, true, in_place},
        [&](std::uint64_t chunk, std::uint64_t number) {
          context.own().staging[buffer(number)].write(value(context.rank, sequence, chunk));
        },
        [&](std::uint64_t chunk, std::uint64_t number) {
          for (int rank = 0; rank < kRanks; ++rank) {
            State& state = states[static_cast<std::size_t>(rank)];
            const Plain& from = lends && rank == 0 ? state.borrowed[chunk] : state.staging[buffer(number)];
            RL_ASSERT(from.read() == value(rank, sequence, chunk));
          }
        });
    if (in_place) context.own().borrowed[kChunks - 1].write(0);  // the program may write its memory again
  }
  std::uint64_t three_stages(Context& context, std::uint64_t sequence, std::uint64_t base) {
    announce(context, sequence);
    return run_three_stages(
        context, {base, kChunks},
        [&](std::uint64_t chunk, std::uint64_t number) {
          context.own().staging[buffer(number)].write(value(context.rank, sequence, chunk));
        },
        [&](std::uint64_t chunk, std::uint64_t number) {
          int sum = 0;
          for (int rank = 0; rank < kRanks; ++rank) {
            sum += rank == context.rank ? value(rank, sequence, chunk)
                                        : states[static_cast<std::size_t>(rank)].staging[buffer(number)].read();
          }
          context.own().results[buffer(number)].write(sum);
        },
        [&](std::uint64_t chunk, std::uint64_t number) {
          int sum = 0;
          for (int rank = 0; rank < kRanks; ++rank) sum += value(rank, sequence, chunk);
          for (State& state : states) RL_ASSERT(state.results[buffer(number)].read() == sum);
        });
  }

  void thread(unsigned index) {
    Context context{states, static_cast<int>(index)};
    one_ahead(context, 1, 0, false);
    const std::uint64_t next = three_stages(context, 2, kChunks);
    one_ahead(context, 3, next, true);
    announce(context, 4);
    one_ahead(context, 5, next + kChunks, false);
  }
};

/// The sender and the receiver of a ring with two cells.
struct Ring : rl::test_suite<Ring, 2> {
  static constexpr std::size_t kCells = 2;
  static constexpr std::uint64_t kMessages = 5;
  struct Head {
    Word<std::uint64_t> taken;
    Word<std::uint32_t> full;
  } head;
  struct Cell {
    Word<std::uint64_t> stamp;
    Plain payload;
  };
  std::array<Cell, kCells> cells;

  void before() {
    head.taken.store(0);
    head.full.store(0);
    for (Cell& cell : cells) cell.stamp.store(0);
  }
  Cell& cell(std::uint64_t number) { return cells[(number - 1) % kCells]; }
  void send() {
    const std::size_t room = fault == Fault::OneCellTooMany ? kCells + 1 : kCells;
    for (std::uint64_t number = 1; number <= kMessages; ++number) {
      if (number > room_up_to(head, room)) {
        ask_for_room(head);
        while (number > room_up_to(head, room)) wait_a_turn();
      }
      cell(number).payload.write(static_cast<int>(number));
      publish(cell(number).stamp, number);
    }
  }
  void receive() {
    for (std::uint64_t number = 1; number <= kMessages; ++number) {
      while (!stands(cell(number).stamp, number)) wait_a_turn();
      RL_ASSERT(cell(number).payload.read() == static_cast<int>(number));
      release(head, number);
    }
  }
  void thread(unsigned index) { index == 0 ? send() : receive(); }
};

/// Two ranks end the world, and the first of them reuses its memory; a late rank reads that memory.
struct LateReader : rl::test_suite<LateReader, 3> {
  static constexpr std::uint32_t kNone = 0, kWriting = 1;
  Word<std::uint32_t> state;
  // Memory that a peer may read while its owner writes, which `ended_before_reads` detects. It is not a Plain, since
  // races on a Plain are errors.
  Word<int> memory;
  rl::var<int> firsts;

  void before() {
    state.store(kNone);
    memory.store(0);
    firsts($) = 0;
  }
  void thread(unsigned index) {
    if (index < 2) {
      if (begin_end(state, kNone, kWriting)) firsts($) = firsts($) + 1;  // if two were first, Relacy finds a race
      if (index == 0) memory.store(1, std::memory_order_relaxed);
    } else {
      const int seen = memory.load(std::memory_order_relaxed);
      if (!ended_before_reads(state, kNone)) RL_ASSERT(seen == 0);
    }
  }
  void after() { RL_ASSERT(firsts($) == 1); }
};

/// Relacy's output. Uses no heap, since Relacy tracks the heap while it writes.
class Report : public std::streambuf {
 public:
  Report() { setp(text_.data(), text_.data() + text_.size()); }
  std::string_view text() const { return {pbase(), static_cast<std::size_t>(pptr() - pbase())}; }

 private:
  int overflow(int) override { return 0; }  // the beginning of the output is enough, since it names the fault
  std::array<char, 200000> text_;
};

/// Runs a model with a fault. Returns true if the result is as expected (`holds`); otherwise prints what Relacy found.
template <class Model>
bool check(const std::string& name, Fault with, bool holds, rl::iteration_t iterations) {
  fault = with;
  rl::test_params params;
  params.iteration_count = iterations;
  params.execution_depth_limit = 20000;
  Report report;
  std::ostream said(&report);
  params.output_stream = params.progress_stream = &said;
  const bool found_nothing = rl::simulate<Model>(params);
  const bool as_expected = found_nothing == holds;
  std::printf("%-6s %s: %s\n", as_expected ? "ok" : "FAILED", name.c_str(),
              found_nothing ? "holds" : rl::test_result_str(params.test_result));
  if (!as_expected) std::printf("%s\n", std::string(report.text()).c_str());
  return as_expected;
}

bool check_all() {
  bool ok = true;
  const auto finds = [&]<class Model>(Model*, const char* name, Fault with) {
    ok = check<Model>(name, with, false, 100000) && ok;
  };
  ok = check<Operations<2>>("operations of 2 ranks", Fault::None, true, 20000) && ok;
  ok = check<Operations<3>>("operations of 3 ranks", Fault::None, true, 5000) && ok;
  Operations<2>* const operations = nullptr;
  finds(operations, "operations, stores that publish are relaxed", Fault::RelaxedStores);
  finds(operations, "operations, loads that wait are relaxed", Fault::RelaxedLoads);
  finds(operations, "operations, one slot for all sequences", Fault::OneSlot);
  finds(operations, "operations, one buffer for all chunks", Fault::OneBuffer);
  finds(operations, "operations, no wait for those who read", Fault::NoWaitForReaders);
  ok = check<Ring>("ring", Fault::None, true, 100000) && ok;
  Ring* const ring = nullptr;
  finds(ring, "ring, stores that publish are relaxed", Fault::RelaxedStores);
  finds(ring, "ring, loads that wait are relaxed", Fault::RelaxedLoads);
  finds(ring, "ring, the sender sees one cell too many", Fault::OneCellTooMany);
  ok = check<LateReader>("late reader", Fault::None, true, 100000) && ok;
  LateReader* const late = nullptr;
  finds(late, "late reader, no fences", Fault::NoFences);
  return ok;
}

}  // namespace
}  // namespace cohort::comm::local

int main() { return cohort::comm::local::check_all() ? 0 : 1; }
