// A rank's status for the agent that started it: its present operation, its training's progress, and its last words if
// an exception ends it. The agent makes the page (a memory file that both map) and reads it. The page outlives the
// rank, so it shows what a killed rank was doing. Without an agent the page is private memory, so writers need no
// check. Writing is a few plain stores; each word has one writer at a time, and a reader's snapshot may mix two
// moments. Any thread may write through StatusPage; a lane belongs to the thread that waits.
// Call, called: for a call into Cohort that consists of several operations. The status page and errors show the call's
// name instead of the operations' names.
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

/// One group's operations of one kind: its collectives, or its messages.
struct alignas(64) LaneStatus {
  std::atomic<std::uint64_t> begun;           ///< number of the last operation that this rank has begun
  std::atomic<std::uint64_t> ended;           ///< number of the last operation that has ended on this rank
  std::atomic<std::uint64_t> what;            ///< kind and types of operation `begun`, packed by `pack`
  std::atomic<std::int64_t> count;            ///< elements of operation `begun`
  std::atomic<std::uint64_t> waited_ns;       ///< time spent waiting for peers so far, apart from short spins
  std::atomic<std::uint64_t> longest_ns;      ///< the longest of these waits
  std::atomic<std::uint64_t> longest_number;  ///< the operation of the longest wait
  std::atomic<std::int32_t> peer;             ///< for a message: the peer's rank in the group
  std::atomic<std::uint32_t> waiting;         ///< 1: the program waits for this operation, which waits for peers

  static std::uint64_t pack(std::uint8_t kind, DType dtype, ReduceOp op) noexcept {
    return kind | static_cast<std::uint64_t>(dtype) << 8 | static_cast<std::uint64_t>(op) << 16;
  }
  void begin(std::uint64_t number, std::uint64_t packed, std::int64_t elements) noexcept {
    what.store(packed, std::memory_order_relaxed);
    count.store(elements, std::memory_order_relaxed);
    begun.store(number, std::memory_order_release);
  }
  void end(std::uint64_t number) noexcept { ended.store(number, std::memory_order_release); }
  /// Adds a wait of operation `begun` for peers.
  void note_wait(std::uint64_t ns) noexcept {
    waited_ns.store(waited_ns.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed);
    if (ns <= longest_ns.load(std::memory_order_relaxed)) return;
    longest_ns.store(ns, std::memory_order_relaxed);
    longest_number.store(begun.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
};

/// A communicator of more than one rank.
struct alignas(64) GroupStatus {
  std::atomic<std::uint64_t> id;  ///< number of the group, the same on all of its ranks; 0: free
  std::atomic<std::int32_t> rank;
  std::atomic<std::int32_t> size;
  std::atomic<std::uint32_t> background;  ///< 1: of a background thread, which does not count as the program's progress
  LaneStatus collectives;
  LaneStatus messages;
};

/// Operations that ranks match by name, and the operation that the program waits for.
struct alignas(64) NameStatus {
  static constexpr std::size_t kWords = 12;
  std::atomic<std::uint64_t> ended;    ///< number of operations that have ended
  std::atomic<std::uint32_t> waiting;  ///< number of the program's threads that wait for an operation
  /// The operation of the last such thread, padded with zeros. Atomic words, since several threads may write
  /// concurrently.
  std::array<std::atomic<std::uint64_t>, kWords> name;
};

/// The program's present call into Cohort that consists of several operations.
struct CallStatus {
  static constexpr std::size_t kWords = 6;
  std::atomic<std::uint32_t> depth;  ///< number of calls that have begun and not ended
  std::array<std::atomic<std::uint64_t>, kWords>
      name;  ///< name of the last call: "CheckpointFolder::save", padded with zeros
};

/// Total times of the rank's collectives, if measured (COHORT_TIMES; `exposed_ns` always). Several threads may add.
struct TimesStatus {
  std::atomic<std::uint64_t> operations;
  std::atomic<std::uint64_t> bytes;       ///< bytes of this rank's payload
  std::atomic<std::uint64_t> busy_ns;     ///< time from beginning to end of each collective
  std::atomic<std::uint64_t> waited_ns;   ///< part of busy_ns: waiting for peers to begin
  std::atomic<std::uint64_t> wire_ns;     ///< part of busy_ns: waiting for bytes of other hosts
  std::atomic<std::uint64_t> wire_bytes;  ///< sent to other hosts
  std::atomic<std::uint64_t> exposed_ns;  ///< time in which a thread of the program only waited for collectives
  std::atomic<std::int64_t> at_ns;        ///< in a copy: time at which it was taken (CLOCK_MONOTONIC)
  std::atomic<std::int64_t> step;         ///< in a copy: number of steps taken before
};

/// Data that this rank sent to other hosts and that a network dropped. One writer at a time: the transport's driver.
struct LossStatus {
  static constexpr std::size_t kWords = 8;
  std::atomic<std::uint64_t> segments;     ///< TCP segments sent again
  std::atomic<std::uint64_t> timeouts;     ///< retransmission time-outs; 0 where the kernel does not count them
  std::atomic<std::uint64_t> timeouts_ms;  ///< time spent in them
  std::atomic<std::uint64_t> most;         ///< segments sent again to `host`, less those to other hosts since
  std::array<std::atomic<std::uint64_t>, kWords> host;  ///< the host with most losses of late, zero-padded
};

/// The reason why the rank fails, for programs to read; the text for people is in its last words.
struct CauseStatus {
  enum State : std::uint32_t { None, Writing, OfWorld, OfProcess };
  std::atomic<std::uint32_t> state;
  std::int32_t code;  ///< an ErrorCode
  std::int32_t rank;  ///< this field and the fields after it are as in ErrorContext
  std::int32_t peer;
  std::uint64_t sequence;
  char host[64];
  char operation[128];
};

/// The first non-finite loss that the rank has logged.
struct NotFiniteStatus {
  enum State : std::uint32_t { None, Writing, Written };
  std::atomic<std::uint32_t> state;
  std::int64_t step;
  char what[96];  ///< "train_loss is NaN"
};

/// The page. Its layout belongs to one build, so an agent of another build is refused before it starts anything.
struct StatusLayout {
  static constexpr std::uint64_t kMagic = 0x3231544154534843;  // "CHSTAT12"
  static constexpr std::size_t kGroups = 64;
  static constexpr std::size_t kKinds = 32;
  static constexpr std::size_t kNameBytes = 16;
  static constexpr std::size_t kWordsBytes = 12 << 10;
  static constexpr std::uint32_t kTellsStacks = 1;     ///< bit of `abilities`: SIGQUIT writes stacks
  static constexpr std::uint32_t kSavesWhenAsked = 2;  ///< bit of `abilities`: saves at a signal, which takes time
  static constexpr std::int64_t kWarmSteps = 2;
  static constexpr std::int32_t kToBeMember = -1;  ///< value of `forming`: waits to become a member

  std::uint64_t magic;
  std::atomic<std::int32_t> pid;         ///< pid of the process that writes the page; 0: no process yet
  std::atomic<std::uint32_t> abilities;  ///< requests that the rank supports
  std::atomic<std::int32_t> forming;     ///< size of the world being formed, or kToBeMember; 0: none
  std::atomic<std::uint32_t> worlds;     ///< number of worlds that the rank has formed
  /// In an elastic job: the epoch of the rank's latest world; -1: no world yet.
  std::atomic<std::int64_t> formed_epoch{-1};
  /// Set when the rank has an elastic job's trained state, so that others can get the state from it. Stays set.
  std::atomic<std::uint32_t> has_state;
  std::atomic<std::int64_t> step;     ///< optimizer steps so far
  std::atomic<std::int64_t> samples;  ///< this rank's samples in those steps, if known
  std::atomic<std::uint32_t> words_ready;
  std::atomic<std::uint32_t> words_length;  ///< stored after the words it counts
  std::int64_t words_ns;                    ///< when the words began (CLOCK_MONOTONIC): shows which rank failed first
  char words[kWordsBytes];                  ///< cause of the rank's end: an exception's type, text and trace
  CauseStatus cause;
  NotFiniteStatus not_finite;
  char kinds[kKinds][kNameBytes];          ///< names of operations, by the kind in LaneStatus::what
  std::atomic<std::int32_t> preempted_by;  ///< the signal by which all ranks save and end; 0: none
  GroupStatus groups[kGroups];
  NameStatus names;
  CallStatus call;
  LossStatus losses;
  TimesStatus times;
  TimesStatus warm;  ///< copy of `times` after the first kWarmSteps steps, which are start-up
  TimesStatus last;  ///< copy of `times` after the last step
  // Written by the agent.
  std::atomic<std::uint64_t> epoch;     ///< latest epoch of an elastic job, from its supervisor
  std::atomic<std::uint32_t> job_ends;  ///< 1: the next signal is for all ranks of the job
};

/// After the layout, the file has the rank's stacks as text, written through the descriptor on request.
inline constexpr std::size_t kStatusStacksBegin = 48 << 10;
inline constexpr std::size_t kStatusBytes = 128 << 10;
static_assert(sizeof(StatusLayout) <= kStatusStacksBegin);

/// For the agent: makes an empty page. Fails with Unavailable if there is no memory.
Result<sys::SharedSegment> create_status_page();

/// This process's page: the agent's (COHORT_STATUS_FD), or private memory.
class StatusPage {
 public:
  static StatusPage& own() noexcept;

  /// Reserves an entry for a communicator until `close`. If no entry is free, or for id 0, returns an entry that nobody
  /// reads.
  GroupStatus& open(std::uint64_t id, int rank, int size, bool background = false) noexcept;
  void close(GroupStatus& group) noexcept;
  void name_kind(std::uint8_t kind, std::string_view name) noexcept;
  /// Records that this rank waits, until `end_init`, for the other ranks of a world of `size`.
  void begin_init(int size) noexcept;
  /// `epoch`: epoch of the formed world; -1 if this process is no member of an elastic job.
  void end_init(bool formed, std::int64_t epoch = -1) noexcept;
  /// Records that this rank has the job's trained state.
  void note_state() noexcept;
  /// `samples`: this rank's number of samples in the step; 0: not known.
  void count_step(std::int64_t samples = 0) noexcept;
  TimesStatus& times() noexcept { return layout_->times; }
  /// Adds what was lost on the way to a peer on `host`.
  void note_losses(std::uint64_t segments, std::uint64_t timeouts, std::uint64_t timeouts_ms,
                   std::string_view host) noexcept;
  /// Only the first call has an effect.
  void note_not_finite(std::string_view what, std::int64_t step) noexcept;
  /// Records that a thread waits for a named operation, until `end_wait`.
  void begin_wait(std::string_view name) noexcept;
  void end_wait() noexcept { layout_->names.waiting.fetch_sub(1, std::memory_order_relaxed); }
  /// Records that the program is in this call, until `end_call`.
  void begin_call(std::string_view name) noexcept;
  void end_call() noexcept { layout_->call.depth.fetch_sub(1, std::memory_order_relaxed); }
  void count_named() noexcept { layout_->names.ended.fetch_add(1, std::memory_order_relaxed); }
  /// Records that this error has ended a world. The first error is kept until another world is formed.
  void note_failure(const Error& error) noexcept { note_cause(error, CauseStatus::OfWorld); }
  /// Records that this error ends the process.
  void note_end(const Error& error) noexcept { note_cause(error, CauseStatus::OfProcess); }
  /// Only the first call writes the words, and returns true. Allocates nothing; may be called in a signal handler, and
  /// in a process that is about to end.
  bool say_last_words(std::string_view words) noexcept;
  /// Appends to the last words. For the caller whose `say_last_words` returned true: it first writes the part that
  /// cannot fail.
  void add_last_words(std::string_view words) noexcept;
  /// Tells the agent that SIGQUIT makes this process write its stacks to `fd()`, and does not end it.
  void announce_stacks() noexcept { layout_->abilities.fetch_or(StatusLayout::kTellsStacks); }
  /// Tells the agent that a signal makes this process save and end, until all callers have called `withdraw_saving`.
  void announce_saving() noexcept;
  void withdraw_saving() noexcept;
  /// Records that all ranks save and end now, because one of them has received this signal.
  void note_preemption(int signal) noexcept { layout_->preempted_by.store(signal, std::memory_order_relaxed); }
  /// The agent's file, to write stacks to; -1 without an agent. The process that asks for stacks sets the file's
  /// position.
  int fd() const noexcept { return fd_; }
  const StatusLayout& layout() const noexcept { return *layout_; }
  /// Returns whether a received signal asks the whole job to end, not only this process.
  bool job_ends() const noexcept { return layout_->job_ends.load(std::memory_order_relaxed) != 0; }
  /// The latest epoch of an elastic job announced to this process; 0: the first epoch, or no elastic job.
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

/// While this object exists, the program is in the call `name`, such as "Preemption::requested".
class Call {
 public:
  explicit Call(std::string_view name) noexcept { StatusPage::own().begin_call(name); }
  ~Call() { StatusPage::own().end_call(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

/// Runs `body` as the call `name`. Errors of operations in `body` also begin with that name.
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
