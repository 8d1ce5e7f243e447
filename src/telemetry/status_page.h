// A rank's status for the agent that started it: the operation it is in, how far its training is, and, if it dies of an
// exception, its last words. The agent makes the page (a memory file that both map) and reads it; the page outlives the
// rank, so that it tells what a killed rank was doing. Without an agent the page is private memory, so that writers
// need not ask. Writing is a few plain stores; each word has one writer at a time, and readers take what they find: a
// snapshot may mix two moments. Any thread may write through StatusPage; a lane belongs to the thread that waits.
// Calls of Cohort's that a program makes appear under their own names, not under those of the operations they consist
// of: on the status page, and in errors.
#pragma once

#include "base/memory.h"
#include "base/result.h"

#include <cohort/dtype.h>
#include <cohort/error.h>

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cohort::status {

/// One kind of waiting of one group: its collectives, or its messages.
struct alignas(64) LaneStatus {
  std::atomic<std::uint64_t> begun;           ///< number of the operation that this rank came to last
  std::atomic<std::uint64_t> ended;           ///< of the last one that is over here
  std::atomic<std::uint64_t> what;            ///< of `begun`, packed by `pack`
  std::atomic<std::int64_t> count;            ///< its elements
  std::atomic<std::uint64_t> waited_ns;       ///< waiting for peers so far, where it took longer than spinning
  std::atomic<std::uint64_t> longest_ns;      ///< the longest of these waits,
  std::atomic<std::uint64_t> longest_number;  ///< and its operation
  std::atomic<std::int32_t> peer;             ///< of a message: the rank in the group
  std::atomic<std::uint32_t> waiting;         ///< the program waits for this operation, and it for peers

  static std::uint64_t pack(std::uint8_t kind, DType dtype, ReduceOp op) noexcept {
    return kind | static_cast<std::uint64_t>(dtype) << 8 | static_cast<std::uint64_t>(op) << 16;
  }
  void begin(std::uint64_t number, std::uint64_t packed, std::int64_t elements) noexcept {
    what.store(packed, std::memory_order_relaxed);
    count.store(elements, std::memory_order_relaxed);
    begun.store(number, std::memory_order_release);
  }
  void end(std::uint64_t number) noexcept { ended.store(number, std::memory_order_release); }
  /// The operation `begun` has waited for peers.
  void note_wait(std::uint64_t ns) noexcept {
    waited_ns.store(waited_ns.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed);
    if (ns <= longest_ns.load(std::memory_order_relaxed)) return;
    longest_ns.store(ns, std::memory_order_relaxed);
    longest_number.store(begun.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
};

/// A communicator of more than one rank.
struct alignas(64) GroupStatus {
  std::atomic<std::uint64_t> id;  ///< the same on all its ranks; 0: free
  std::atomic<std::int32_t> rank;
  std::atomic<std::int32_t> size;
  std::atomic<std::uint32_t> background;  ///< of a thread beside the program: no part of how far that is
  LaneStatus collectives;
  LaneStatus messages;
};

/// Operations that ranks match by name, and the one that the program waits for.
struct alignas(64) NameStatus {
  static constexpr std::size_t kWords = 12;
  std::atomic<std::uint64_t> ended;    ///< operations that are over
  std::atomic<std::uint32_t> waiting;  ///< threads of the program that wait for one
  /// The name that the last of them waits for, filled with zeros. In words, since several threads may write at once.
  std::array<std::atomic<std::uint64_t>, kWords> name;
};

/// The call of the program that is in progress and consists of several of Cohort's operations.
struct CallStatus {
  static constexpr std::size_t kWords = 6;
  std::atomic<std::uint32_t> depth;  ///< calls that have begun and not ended
  std::array<std::atomic<std::uint64_t>, kWords>
      name;  ///< of the last one: "CheckpointFolder::save", filled with zeros
};

/// Times of the rank's collectives so far, if it measures them (COHORT_TIMES; `exposed_ns` always). Several threads may
/// add.
struct TimesStatus {
  std::atomic<std::uint64_t> operations;
  std::atomic<std::uint64_t> bytes;       ///< of this rank's payload
  std::atomic<std::uint64_t> busy_ns;     ///< from the beginning to the end of each
  std::atomic<std::uint64_t> waited_ns;   ///< of that: for peers to come to them,
  std::atomic<std::uint64_t> wire_ns;     ///< and for bytes of other hosts
  std::atomic<std::uint64_t> wire_bytes;  ///< sent to other hosts
  std::atomic<std::uint64_t> exposed_ns;  ///< in which a thread of the program did nothing but wait for them
  std::atomic<std::int64_t> at_ns;        ///< of a copy: when it was taken (CLOCK_MONOTONIC)
  std::atomic<std::int64_t> step;         ///< and how many steps had been taken
};

/// The reason why the rank fails, for programs; the text for people is in its last words.
struct CauseStatus {
  enum State : std::uint32_t { None, Writing, OfWorld, OfProcess };
  std::atomic<std::uint32_t> state;
  std::int32_t code;  ///< an ErrorCode
  std::int32_t rank;  ///< this and the rest: as in ErrorContext
  std::int32_t peer;
  std::uint64_t sequence;
  char host[64];
  char operation[128];
};

/// A loss that the rank has logged and that is no number: the first one.
struct NotFiniteStatus {
  enum State : std::uint32_t { None, Writing, Written };
  std::atomic<std::uint32_t> state;
  std::int64_t step;
  char what[96];  ///< "train_loss is NaN"
};

/// The page. Its numbers are those of one build: the agent of another is refused before it starts anything.
struct StatusLayout {
  static constexpr std::uint64_t kMagic = 0x3131544154534843;  // "CHSTAT11"
  static constexpr std::size_t kGroups = 64;
  static constexpr std::size_t kKinds = 32;
  static constexpr std::size_t kNameBytes = 16;
  static constexpr std::size_t kWordsBytes = 12 << 10;
  static constexpr std::uint32_t kTellsStacks = 1;     ///< of `abilities`
  static constexpr std::uint32_t kSavesWhenAsked = 2;  ///< a signal makes it save and end: it is given time for that
  static constexpr std::int64_t kWarmSteps = 2;
  static constexpr std::int32_t kToBeMember = -1;  ///< of `joining`: it waits for an epoch of which it is a member

  std::uint64_t magic;
  std::atomic<std::int32_t> pid;         ///< of the process that writes it; 0: none has come yet
  std::atomic<std::uint32_t> abilities;  ///< requests it supports
  std::atomic<std::int32_t> joining;     ///< the size of a world whose ranks it waits for, or kToBeMember; 0: none now
  std::atomic<std::uint32_t> worlds;     ///< that it has formed so far
  /// In an elastic job: the epoch of members in which the rank has formed its latest world; -1: none yet.
  std::atomic<std::int64_t> formed_epoch{-1};
  /// Set once the rank holds the elastic job's trained state, so that others can get it from this rank. Stays set.
  std::atomic<std::uint32_t> has_state;
  std::atomic<std::int64_t> step;     ///< optimizer steps so far
  std::atomic<std::int64_t> samples;  ///< of this rank in these, where who counts steps knows them
  std::atomic<std::uint32_t> words_ready;
  std::atomic<std::uint32_t> words_length;  ///< stored after the words that it counts
  std::int64_t words_ns;                    ///< when they began (CLOCK_MONOTONIC): tells which rank was the first
  char words[kWordsBytes];                  ///< cause of its end: an exception's type, text and trace
  CauseStatus cause;
  NotFiniteStatus not_finite;
  char kinds[kKinds][kNameBytes];          ///< names of operations, by the number in LaneStatus::what
  std::atomic<std::int32_t> preempted_by;  ///< the signal because of which all ranks save and end; 0: none
  GroupStatus groups[kGroups];
  NameStatus names;
  CallStatus call;
  TimesStatus times;
  TimesStatus warm;  ///< `times` after the first kWarmSteps steps: what comes before is start-up
  TimesStatus last;  ///< and after the last step
  // Written by the agent.
  std::atomic<std::uint64_t> epoch;     ///< the latest of an elastic job, as its supervisor says
  std::atomic<std::uint32_t> job_ends;  ///< 1: the signal that comes is for all ranks of the job
};

/// After the layout, in the same file: stacks, as text, written through the descriptor when the rank is asked for them.
inline constexpr std::size_t kStatusStacksBegin = 48 << 10;
inline constexpr std::size_t kStatusBytes = 128 << 10;
static_assert(sizeof(StatusLayout) <= kStatusStacksBegin);

/// For the agent: an empty page. Unavailable if there is no memory.
Result<sys::SharedSegment> create_status_page();

/// This process's page: the agent's (COHORT_STATUS_FD), or private memory.
class StatusPage {
 public:
  static StatusPage& own() noexcept;

  /// Room for a communicator, until `close`. If all are taken, and for id 0, several share one that nobody reads.
  GroupStatus& open(std::uint64_t id, int rank, int size, bool background = false) noexcept;
  void close(GroupStatus& group) noexcept;
  void name_kind(std::uint8_t kind, std::string_view name) noexcept;
  /// It waits for the others of a world of `size`, until `end_join`.
  void begin_join(int size) noexcept;
  /// `epoch`: of the members who have formed it; -1: it is none of an elastic job's members.
  void end_join(bool formed, std::int64_t epoch = -1) noexcept;
  /// This rank has the job's trained state.
  void note_state() noexcept;
  /// `samples`: of this rank in it; 0: not known.
  void count_step(std::int64_t samples = 0) noexcept;
  TimesStatus& times() noexcept { return layout_->times; }
  /// The first call counts.
  void note_not_finite(std::string_view what, std::int64_t step) noexcept;
  /// A thread waits for an operation by name, until `end_wait`.
  void begin_wait(std::string_view name) noexcept;
  void end_wait() noexcept { layout_->names.waiting.fetch_sub(1, std::memory_order_relaxed); }
  /// The program is in this until `end_call`.
  void begin_call(std::string_view name) noexcept;
  void end_call() noexcept { layout_->call.depth.fetch_sub(1, std::memory_order_relaxed); }
  void count_named() noexcept { layout_->names.ended.fetch_add(1, std::memory_order_relaxed); }
  /// A world has ended by this error. The first one counts, until another world is formed.
  void note_failure(const Error& error) noexcept { note_cause(error, CauseStatus::OfWorld); }
  /// The process ends by this error.
  void note_end(const Error& error) noexcept { note_cause(error, CauseStatus::OfProcess); }
  /// The first call counts, and returns true. Allocates nothing; may be called by a signal handler, and by a process
  /// that is about to end.
  bool say_last_words(std::string_view words) noexcept;
  /// Adds to the last words, by the caller that was first: so the safe part is written before the part that may fail.
  void add_last_words(std::string_view words) noexcept;
  /// Tells the agent that SIGQUIT makes this process write its stacks to `fd()`, and that it lives on.
  void announce_stacks() noexcept { layout_->abilities.fetch_or(StatusLayout::kTellsStacks); }
  /// A signal makes this process save and end, until all callers that announced it have withdrawn it.
  void announce_saving() noexcept;
  void withdraw_saving() noexcept;
  /// All ranks save and end now, because one of them was asked to by this signal.
  void note_preemption(int signal) noexcept { layout_->preempted_by.store(signal, std::memory_order_relaxed); }
  /// The agent's file, to write stacks to; -1 if there is no agent. The process that asks for stacks sets its position.
  int fd() const noexcept { return fd_; }
  const StatusLayout& layout() const noexcept { return *layout_; }
  /// A signal that has come asks the whole job to end, and not this process alone.
  bool job_ends() const noexcept { return layout_->job_ends.load(std::memory_order_relaxed) != 0; }
  /// The latest epoch of an elastic job announced to this process; 0: the first, or there is none.
  std::uint64_t announced_epoch() const noexcept { return layout_->epoch.load(std::memory_order_relaxed); }

  StatusPage(const StatusPage&) = delete;
  StatusPage& operator=(const StatusPage&) = delete;

 private:
  StatusPage() noexcept;
  bool mine() const noexcept;
  void note_cause(const Error& error, CauseStatus::State kind) noexcept;

  sys::Mapping mapping_;
  StatusLayout* layout_ = nullptr;
  int fd_ = -1;
  std::atomic<bool> spoken_{false};
  std::atomic<int> saving_{0};
  GroupStatus spare_{};
};

/// The program is in `name`, such as "Preemption::requested", as long as this lives.
class Call {
 public:
  explicit Call(std::string_view name) noexcept { StatusPage::own().begin_call(name); }
  ~Call() { StatusPage::own().end_call(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

/// Runs `body` as `name`, which errors of operations begin with, too.
template <class Body>
auto called(std::string_view name, const Body& body) {
  const Call call(name);
  try {
    return body();
  } catch (const Error& error) {
    if (error.context().operation.empty()) throw;
    throw Error(error.code(), fmt::format("{}: {}", name, error.what()), error.context());
  }
}

}  // namespace cohort::status
