// The order of loads and stores by which the ranks of a host share memory without locks: announcements, counters,
// chunks through two buffers, a channel's ring of cells, and the end of a world. Nothing here has a state of its own.
// Templates over the words' type: ranks have std::atomic in shared memory, protocol_model.cpp has words for which it
// tries the interleavings, and the values that the memory model lets each load see.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace cohort::comm::local {

/// A fence between words of this type.
template <class Word>
struct FenceOf {
  static void set(std::memory_order order) noexcept { std::atomic_thread_fence(order); }
};

// --- announcements and counters ---

/// Publishes what its rank has written before.
template <class Word, class Number>
void publish(Word& word, Number number) noexcept {
  word.store(number, std::memory_order_release);
}
/// True once a counter has come to `number`: then what its rank wrote before may be read.
template <class Word, class Number>
bool reached(const Word& word, Number number) noexcept {
  return word.load(std::memory_order_acquire) >= number;
}
/// True where `number` itself stands there. For words whose next value is published only when all have read this one.
template <class Word, class Number>
bool stands(const Word& word, Number number) noexcept {
  return word.load(std::memory_order_acquire) == number;
}

// --- chunks ---

/// An operation's chunks in the ranks' double buffers. Chunks are counted over all operations: the parity of a chunk's
/// number says which buffer it has.
struct Chunks {
  std::uint64_t base = 0;   ///< number of the first
  std::uint64_t count = 0;  ///< the same on all ranks
  bool stages = true;       ///< this rank's part of a chunk goes through its buffer, else peers need not wait for it
  bool takes = true;        ///< this rank needs what the others have staged
  bool lends = false;       ///< peers read this rank's memory itself: it waits until they have
};

/// Copying in runs one chunk ahead of taking out: one wait for each chunk. `Context` has `wait(counter, number)` for
/// all ranks' counters, `post(counter, number)` for the own one, and `State` with the counters staged, reduced.
/// `copy_in(i, number)` fills this rank's buffer with chunk i, `take(i, number)` reads all ranks'.
template <class Context, class CopyIn, class Take>
void run_one_ahead(Context&& context, const Chunks& chunks, CopyIn copy_in, Take take) {
  using State = typename std::remove_reference_t<Context>::State;
  const auto stage = [&](std::uint64_t chunk) {
    const std::uint64_t number = chunks.base + chunk;
    if (chunks.stages) {
      if (number >= 2) context.wait(&State::reduced, number - 1);
      copy_in(chunk, number);
    }
    context.post(&State::staged, number + 1);
  };
  if (chunks.count > 0) stage(0);  // what is posted of a chunk that never comes would stand for the next operation's
  for (std::uint64_t chunk = 0; chunk < chunks.count; ++chunk) {
    const std::uint64_t number = chunks.base + chunk;
    if (chunk + 1 < chunks.count) stage(chunk + 1);
    if (chunks.takes) {
      context.wait(&State::staged, number + 1);
      take(chunk, number);
    }
    context.post(&State::reduced, number + 1);
  }
  if (chunks.lends && chunks.count > 0) context.wait(&State::reduced, chunks.base + chunks.count);
}

/// Three stages with one wait for each step: in step s a rank copies in chunk s, folds its slice of chunk s - 1 and
/// copies out what the others folded of chunk s - 2. Two buffers of each kind do: what a step writes was last read in
/// the step before, which all have left. Uses `count` + 2 numbers; gives the first that is free.
template <class Context, class CopyIn, class FoldOwn, class CopyOut>
std::uint64_t run_three_stages(Context&& context, const Chunks& chunks, CopyIn copy_in, FoldOwn fold_own,
                               CopyOut copy_out) {
  using State = typename std::remove_reference_t<Context>::State;
  for (std::uint64_t step = 0; step < chunks.count + 2; ++step) {
    const std::uint64_t number = chunks.base + step;
    if (step > 0) context.wait(&State::staged, number);
    if (step < chunks.count) copy_in(step, number);
    if (step >= 1 && step <= chunks.count) fold_own(step - 1, number - 1);
    if (step >= 2) copy_out(step - 2, number - 2);
    if (step < chunks.count + 1) context.post(&State::staged, number + 1);
  }
  // For operations with other steps. Published like the rest: a rank still waiting for the last step may see these.
  const std::uint64_t next = chunks.base + chunks.count + 2;
  context.skip(&State::staged, next);
  context.skip(&State::reduced, next);
  return next;
}

// --- a ring of cells between two ranks ---

/// The sender's: the last number for which a cell is free.
template <class Head>
std::uint64_t room_up_to(const Head& head, std::size_t cells) noexcept {
  return head.taken.load(std::memory_order_acquire) + cells;
}
/// For a sender that found no space: says that it waits for some, and has to check once more before it sleeps.
template <class Head>
void ask_for_room(Head& head) noexcept {
  head.full.exchange(1);
}
/// For the receiver, which has read the cell. True if the sender waits for space.
template <class Head>
bool release(Head& head, std::uint64_t number) noexcept {
  head.taken.store(number, std::memory_order_release);
  return head.full.load(std::memory_order_relaxed) != 0;
}

// --- the end of a world ---

/// True for the one caller that is to write down why the world ends. Every caller has its own memory back afterwards:
/// peers that read it meanwhile see in `ended_before_reads` that they must not use it.
template <class Word>
bool begin_end(Word& state, std::uint32_t none, std::uint32_t writing) noexcept {
  const bool first = state.compare_exchange_strong(none, writing);
  FenceOf<Word>::set(std::memory_order_seq_cst);
  return first;
}
/// False: whatever this thread has read of its peers' memory so far was theirs to give. The two fences are a pair, as
/// in a seqlock.
template <class Word>
bool ended_before_reads(const Word& state, std::uint32_t none) noexcept {
  FenceOf<Word>::set(std::memory_order_acquire);
  return state.load(std::memory_order_acquire) != none;
}

}  // namespace cohort::comm::local
