// The order of loads and stores with which the ranks of a host share memory without locks: announcements, counters,
// chunks in two buffers, a channel's ring of cells, and the end of a world. The functions have no state.
// The functions are templates over the type of a word: ranks use std::atomic in shared memory; protocol_model.cpp uses
// words that try all interleavings, and all values that the memory model allows each load to see.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace cohort::comm::local {

/// The memory fence that goes with words of this type.
template <class Word>
struct FenceOf {
  static void set(std::memory_order order) noexcept { std::atomic_thread_fence(order); }
};

// --- announcements and counters ---

/// Publishes, with `number`, what this rank has written before.
template <class Word, class Number>
void publish(Word& word, Number number) noexcept {
  word.store(number, std::memory_order_release);
}
/// True if a counter has reached `number`, so that everything its rank wrote before may be read.
template <class Word, class Number>
bool reached(const Word& word, Number number) noexcept {
  return word.load(std::memory_order_acquire) >= number;
}
/// True if the word is exactly `number`. For words whose next value is published only after all have read this value.
template <class Word, class Number>
bool stands(const Word& word, Number number) noexcept {
  return word.load(std::memory_order_acquire) == number;
}

// --- chunks ---

/// An operation's chunks in the ranks' double buffers. Chunks are numbered over all operations; the parity of a chunk's
/// number determines its buffer.
struct Chunks {
  std::uint64_t base = 0;   ///< number of the first chunk
  std::uint64_t count = 0;  ///< number of chunks, the same on all ranks
  bool stages = true;       ///< this rank copies its part of a chunk into its buffer; else its buffer is not used
  bool takes = true;        ///< this rank needs what the others have staged
  bool lends = false;       ///< peers read this rank's memory in place, so it waits at the end until they have done so
};

/// Runs chunks through the buffers, with one wait for each chunk: copies a chunk in while the one before is taken out.
/// `Context` has `wait(counter, number)` for all ranks' counters, `post(counter, number)` for the rank's own, and
/// `State` with the counters `staged` and `reduced`. `copy_in(i, number)` fills this rank's buffer with chunk i,
/// `take(i, number)` reads all ranks' buffers.
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
  if (chunks.count > 0) stage(0);  // without chunks, a post would count for the next operation's first chunk
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

/// Runs chunks through three stages with one wait for each step: in step s a rank copies in chunk s, folds its slice of
/// chunk s - 1 and copies out what the others folded of chunk s - 2. Two buffers of each kind are enough: a step writes
/// buffers that were last read in the step before, which all have left. Uses `count` + 2 numbers; returns the next.
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
  // Makes both counters skip to the next number, for operations with other steps. Publishes with release, since a rank
  // that still waits for the last step may read these values.
  const std::uint64_t next = chunks.base + chunks.count + 2;
  context.skip(&State::staged, next);
  context.skip(&State::reduced, next);
  return next;
}

// --- a ring of cells between two ranks ---

/// For the sender: returns the last number for which a cell is free.
template <class Head>
std::uint64_t room_up_to(const Head& head, std::size_t cells) noexcept {
  return head.taken.load(std::memory_order_acquire) + cells;
}
/// For a sender that found no space: notes that it waits. The sender has to check once more before it sleeps.
template <class Head>
void ask_for_room(Head& head) noexcept {
  head.full.exchange(1);
}
/// For the receiver: frees a cell that it has read. Returns true if the sender waits for space.
template <class Head>
bool release(Head& head, std::uint64_t number) noexcept {
  head.taken.store(number, std::memory_order_release);
  return head.full.load(std::memory_order_relaxed) != 0;
}

// --- the end of a world ---

/// Begins the end of the world. Returns true for the one caller that has to record the reason. Every caller may reuse
/// its memory afterwards: `ended_before_reads` tells peers reading it meanwhile that the data is invalid.
template <class Word>
bool begin_end(Word& state, std::uint32_t none, std::uint32_t writing) noexcept {
  const bool first = state.compare_exchange_strong(none, writing);
  FenceOf<Word>::set(std::memory_order_seq_cst);
  return first;
}
/// Returns false if the world had not ended when this thread read its peers' memory, so that the data is valid. The two
/// fences form a pair, as in a seqlock.
template <class Word>
bool ended_before_reads(const Word& state, std::uint32_t none) noexcept {
  FenceOf<Word>::set(std::memory_order_acquire);
  return state.load(std::memory_order_acquire) != none;
}

}  // namespace cohort::comm::local
