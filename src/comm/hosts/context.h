// Base of the algorithms between hosts (Context), with the memory of large sums (SumMemory) and the length of their
// pieces (ChunkTuner); then the phases of an operation. Belongs to the thread that runs operations.
#pragma once

#include "comm/api/request.h"
#include "comm/engine/agreement.h"
#include "comm/engine/pending_work.h"
#include "comm/hosts/level_sums.h"
#include "comm/hosts/levels.h"
#include "comm/hosts/world.h"
#include "comm/shm/algorithms.h"
#include "comm/transport/transport.h"

#include <cohort/error.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::comm::hosts {

// Adapts the length of large sums' pieces, and the number of pieces in transit, to the measured speed of the wire. Each
// rank measures for itself. All ranks have to divide alike, so each proposes a number of doublings of the piece length,
// and the least is used. Belongs to an engine and its thread.
class ChunkTuner {
 public:
  using Duration = std::chrono::steady_clock::duration;
  explicit ChunkTuner(const Layout& layout) noexcept;

  /// Records that an operation moved `bytes` of this rank's stripe in each direction in the time `took`.
  void learn(std::size_t bytes, Duration took) noexcept;
  /// Number of doublings of the piece length that this rank proposes, up to `most`.
  int doublings() const noexcept { return doublings_; }
  int most() const noexcept { return most_; }

  /// Bytes of a piece; on a host with several ranks, of all its stripes together.
  std::size_t piece_bytes(int doublings = 0) const noexcept { return least_bytes_ << doublings; }
  /// Bytes of a block, which the ranks of a host reduce together. For a rank alone on its host, a block is a piece.
  std::size_t block_bytes(std::size_t sum_bytes, int doublings) const noexcept;
  /// Returns how often pieces of a sum of `sum_bytes` are doubled if all ranks propose `doublings`. With one rank per
  /// host, and more than two hosts, results return only for whole pieces, so a sum is divided into a few at least.
  int doublings_of(std::size_t sum_bytes, int doublings) const noexcept;
  /// Returns how many pieces a rank may send ahead of what it has received, up to `kMostAhead`. With too many, pieces
  /// wait in queues, and acknowledgements of the other direction wait behind them, so the two directions of a link
  /// alternate. With too few, the wire is idle at times. All ranks have to use the same number: otherwise the early
  /// pieces of one rank delay those that a slower rank waits for.
  std::int64_t ahead(int doublings, int on_the_way) const noexcept;
  /// Number of pieces, counted undoubled, that this rank proposes to have in transit.
  int on_the_way() const noexcept;
  static constexpr std::int64_t kMostAhead = 24;

 private:
  const int hosts_;
  const int columns_;
  const bool alone_;  // one rank on each host
  const std::size_t least_bytes_;
  int most_ = 0;
  double rate_ = 0;  // recent bytes per second of this rank
  int doublings_ = 0;
};

// Memory of large sums between hosts (stripes.cpp, sums.cpp), reused by later operations, so that its pages are first
// touched only once. Belongs to the thread that runs operations.

/// The elements that the ranks of a host reduce and gather together.
struct Block {
  std::int64_t begin = 0;  // in elements of the buffer
  std::int64_t count = 0;
  std::int64_t left = 0;               // elements of the slice for which no result has come over the wire
  Slice slice;                         // this stripe's share, in elements of the block
  const std::byte* partial = nullptr;  // this host's sum of the slice
  std::byte* result = nullptr;         // the slice's result
  std::vector<std::byte> partial_bytes, result_bytes, whole_bytes;
  std::shared_ptr<const Counts> shares;  // by local rank, elements of the block
  std::uint64_t borrowed = 0;            // for `wait_until_read`, before `result` is reused
};
/// The elements sent over the wire together.
struct Piece {
  std::int64_t number = 0;
  std::int64_t block = 0;
  std::int64_t first = 0;  // in elements of the block's slice
  std::int64_t count = 0;
  bool sending = false;
  std::vector<std::byte> raw_bytes;                      // by host, the host's input to the part that this host folds
  std::vector<std::byte> coded_bytes;                    // in a wire format: the data sent, then the data received
  std::vector<float> wide;                               // by host, raw_bytes as floats
  std::vector<transport::Outgoing> raw_out, folded_out;  // by host
  std::vector<transport::Incoming> raw_in, folded_in;
  LevelSum by_levels;  // replaces frames and memory of this piece, with more than Levels::kRadix hosts
};
/// A chunk of each rank's output of a reduce_scatter.
struct Chunk {
  std::vector<std::byte> packed_bytes;  // this rank's input to the chunk, in the order of the host's sum
  std::vector<std::byte> sum_bytes;
  std::vector<const std::byte*> sums;    // by host, this host's sum for the rank of that host in this stripe
  std::vector<std::byte> raw_bytes;      // by host, the host's input to the part that this rank keeps
  std::vector<bool> sends;               // by host
  std::vector<transport::Outgoing> out;  // by host
  std::vector<transport::Incoming> in;
};

struct SumMemory {
  Contributors contributors;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Piece>> pieces;
  std::vector<std::unique_ptr<Chunk>> chunks;
  LevelSum gathered;
};

/// Protects frames of an operation that are local variables: if the function is left by an exception, the transport
/// drops the frames before their memory is freed. Declare the guard after the frames.
class FrameGuard {
 public:
  explicit FrameGuard(World& world) noexcept : world_(world), exceptions_(std::uncaught_exceptions()) {}
  /// Ends the world unless it has ended. If memory runs out here too, the process ends, and its peers report it.
  ~FrameGuard() noexcept {
    if (std::uncaught_exceptions() == exceptions_) return;
    if (!world_.ended()) world_.end(ErrorCode::Internal, -1, world_.label().number(), "out of memory in an operation");
    world_.tell_if_ended();
  }
  FrameGuard(const FrameGuard&) = delete;
  FrameGuard& operator=(const FrameGuard&) = delete;

 private:
  World& world_;
  const int exceptions_;
};

/// Steps of an operation, in the upper bits of the tags of their frames, so that no step receives another's frame.
enum class Step : std::uint32_t {
  Info,
  Raw,
  Folded,
  Chain,
  Block,
  Direct,
  Partial,
  Card,
  Descriptions,
  Up,
  Down,
  Turn
};
inline std::uint32_t tag(Step step, std::int64_t index) noexcept {
  return static_cast<std::uint32_t>(step) << 28 | (static_cast<std::uint32_t>(index) & 0x0FFFFFFF);
}

// Base of the algorithms between hosts: placement, contributions of all ranks, sending and receiving frames, parts that
// the ranks of this host carry out together, and waiting, within deadlines and while peers live. Belongs to the thread
// that runs operations.
class Context {
 public:
  using Clock = std::chrono::steady_clock;

  Context(World& world, Waiters& waiters, std::function<void()> meanwhile);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  World& world;
  const Layout& layout;
  const Levels& levels;
  local::Context& local;  ///< the context of the ranks of this host
  transport::Transport& transport;
  /// Payloads up to this size may travel inline in a round, to all hosts.
  const std::size_t inline_bytes;
  /// Limit for inline sums in the next round. Higher for ranks alone on their hosts and a fast wire, if sending data
  /// more than once takes no longer than the round trips that this saves. Equal on all ranks, since it follows from
  /// their last round.
  std::size_t sum_inline_bytes() const noexcept;
  static constexpr std::size_t kMostInline = std::size_t{64} << 10;
  ChunkTuner tuner;
  SumMemory memory;

  // State of the running operation:
  std::uint64_t sequence = 0;
  Agreement agreement;     ///< all ranks' contributions
  int pieces_doubled = 0;  ///< number of doublings of the piece length
  int on_the_way = 0;      ///< pieces in transit, counted undoubled
  bool over = false;       ///< the round is over: all ranks have called the operation
  /// The last weighted sum's weights were not all equal and above 0, so the next one's are not expected to be. The same
  /// on all ranks.
  bool weights_differ = false;

  /// Begins the next operation, with the number `sequence`.
  void begin(const Descriptor& own, Clock::time_point called, std::chrono::milliseconds timeout);
  /// Ends the operation in the status page.
  void end() noexcept { lane_.end(sequence); }

  /// Drives the transport until `ready()`. `missing()` returns the ranks that are waited for.
  template <class Ready, class Missing>
  void wait(Ready ready, Missing missing);
  /// Checks on the other ranks once and drives the transport, during an operation carried out elsewhere (on a GPU).
  void attend();
  void wait_for(transport::Incoming& frame);
  void wait_for(transport::Outgoing& frame);
  /// Waits until `receiver` lets this rank send (`receive_in_turns`). It has time to report first who keeps it waiting.
  void wait_for_turn(int receiver, std::int64_t number);
  void send(transport::Outgoing& frame, int peer, std::uint32_t tag, const void* data, std::size_t bytes);
  void receive(transport::Incoming& frame, int peer, std::uint32_t tag, void* to, std::size_t room);

  /// Runs a part that all ranks of this host carry out together. While this rank waits for the others, it keeps driving
  /// the transport, since another host may depend on that.
  template <class Body>
  void with_neighbours(Body body);
  /// Runs an operation of the local world by `with_neighbours`.
  void run_local(const Request& request);
  void local_broadcast(int root, void* data, std::size_t bytes);

  /// Returns scratch buffer number `which`, of at least `bytes` bytes.
  std::vector<std::byte>& scratch(std::size_t which, std::size_t bytes);

  // Costs of the operation so far:
  std::chrono::nanoseconds blocked{0};  ///< time waiting for frames and for the other ranks of this host
  std::size_t wire_bytes = 0;           ///< sent

 private:
  static constexpr auto kLook = std::chrono::milliseconds(10);      // between checks of peers and deadlines
  static constexpr auto kSpinning = std::chrono::microseconds(50);  // longest spin before the thread yields its core
  static constexpr auto kLeastSpinning = std::chrono::microseconds(2);
  static constexpr auto kYielding = std::chrono::microseconds(2000);  // then it sleeps; a few blocks' wire time
  static constexpr auto kTelling = std::chrono::microseconds(300);    // longer waits are shown in the status page
  static constexpr auto kTaken = std::chrono::microseconds(1000);     // a yield that takes longer shows a busy core
  static constexpr auto kBusy = std::chrono::milliseconds(50);        // how long waits then sleep without spinning

  /// While this object exists, the status page can show that the program waits for others in this operation.
  class Waiting {
   public:
    explicit Waiting(Context& context) : context_(context), since_(Clock::now()) {}
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Clock::time_point since() const noexcept { return since_; }
    /// Shows the wait in the status page, or updates it there.
    void tell() noexcept;

   private:
    Context& context_;
    const Clock::time_point since_;
    bool told_ = false;
  };

  void look_after(const std::function<std::vector<int>()>& missing);
  void tell_of_long_wait(Clock::time_point since, Clock::time_point now);
  void end_wait();
  void while_with_neighbours();
  Clock::time_point deadline_of(const std::vector<int>& missing) const noexcept;
  void note_away(bool away) const noexcept {
    world.local_world().state(layout.local).away.store(away ? 1 : 0, std::memory_order_relaxed);
  }
  std::string omission(const std::vector<int>& missing, bool all_wait) const;
  /// True if the operation may move objects and its round is over; a round itself moves only descriptions.
  bool moves_objects() const noexcept { return over && may_be_object(agreement.agreed.dtype); }

  status::LaneStatus& lane_;
  Waiters& waiters_;
  const std::function<void()> meanwhile_;
  Clock::time_point looked_{};
  bool for_turn_ = false;      // waits for its turn to send
  bool told_of_wait_ = false;  // peers were told that this rank waits, and not yet that it goes on
  Clock::time_point busy_until_{};
  Clock::duration spinning_ = kSpinning;
  Waiting* here_ = nullptr;    // the wait for the other ranks of this host
  Clock::time_point drove_{};  // when this rank last drove the transport in that wait
  std::vector<std::vector<std::byte>> scratch_;
};

Request local_request(Kind kind, DType dtype);

template <class Body>
void Context::with_neighbours(Body body) {
  if (layout.locals == 1) return;
  Waiting waiting(*this);
  here_ = &waiting;
  drove_ = waiting.since();
  try {
    body();
  } catch (const Error&) {
    here_ = nullptr;
    world.tell_if_ended();  // before frames of this operation go out of scope
    throw;
  }
  here_ = nullptr;
  end_wait();
  blocked += local.take_waited();
}

template <class Ready, class Missing>
void Context::wait(Ready ready, Missing missing) {
  if (ready()) return;
  const bool spins = waiters_.attended.load(std::memory_order_relaxed) > 0 && !world.local_world().crowded();
  Waiting waiting(*this);
  const auto since = waiting.since();
  bool away = false;  // the ranks of this host can see that this rank waits for another host
  int yields = 0;
  bool slept = false;
  while (!ready()) {
    if (world.ended()) world.throw_ended();
    const auto now = Clock::now();
    const bool awake =
        waiters_.attended.load(std::memory_order_relaxed) > 0 && now - since < kYielding && now > busy_until_;
    if (now - since >= kTelling) waiting.tell();
    if (!awake) {
      slept = true;
      transport.sleep(kLook);
      meanwhile_();
    } else if (transport.progress()) {
      meanwhile_();
    } else if (!spins || now - since > spinning_) {
      ++yields;
      ::sched_yield();
      // Other threads use the core: sleep, since a thread that wakes is scheduled before one that has yielded.
      if (Clock::now() - now > kTaken) busy_until_ = now + kBusy;
    }
    if (now - looked_ >= kLook) {
      looked_ = now;
      if (!away) note_away(true);
      away = true;
      tell_of_long_wait(since, now);
      if (!ready()) look_after(missing);
    }
  }
  // The awaited rank may share the core, and run only when this thread yields, so that spinning before that is wasted.
  if (yields == 0 && !slept) spinning_ = std::min<Clock::duration>(spinning_ * 2, kSpinning);
  if (yields == 1 || yields == 2) spinning_ = std::max<Clock::duration>(spinning_ / 2, kLeastSpinning);
  if (away) note_away(false);
  end_wait();
  blocked += Clock::now() - since;
}

// Phases of an operation between hosts: a round, then sums or moves. The functions run on all ranks, on the thread that
// runs the operation.

// Rounds: all ranks exchange the operation's descriptions, and reach one decision before any result is delivered. Small
// sums are part of the round.

/// Outcome of the last round, in addition to the context's `agreement` and `pieces_doubled`. Its memory is reused.
struct Round {
  std::chrono::nanoseconds waited{0};   ///< time until the other ranks had called the operation
  bool delivered = false;               ///< the result was part of the round
  bool agreed_here = false;             ///< the descriptions of this host's ranks are uniform
  std::vector<Descriptor> here_brings;  ///< descriptions of this host's ranks; only one if they agree
  std::vector<std::byte> info;
  std::vector<std::vector<std::byte>> infos;  ///< by host
  std::vector<std::byte> small;               ///< a decision, followed by the result
  std::vector<float> residual;                ///< the new residual if delivered
};

/// With more than Levels::kRadix hosts, exchanges the leaders' contributions to a round by levels (level_rounds.cpp).
/// Sets the context's agreement, but does not settle it. `request` is null if no result is part of the round;
/// otherwise, if all agree, the fold of all payloads is written to `result`.
void exchange_by_levels(Context& context, Round& round, const Request* request, const Descriptor& own,
                        const std::byte* payload, void* result);
/// `request` is null on a rank that has joined.
void meet_all(Context& context, Round& round, const Request* request, const Descriptor& own);
/// The ranks' disagreement, as this one sees it.
std::optional<Disagreement> disagreement(const Context& context);
/// Compares what ranks send in an all_to_all_v with what is expected.
std::optional<Disagreement> compare_counts(Context& context, const Request& request);
/// If there is a disagreement, throws Mismatch, or the error that has ended the world.
void refuse_if(const Context& context, std::optional<Disagreement> found);

// Execution, after all ranks agree: sums (below), and operations that only move data. Each byte is sent once to each
// host that needs it. The functions run on all ranks, on the thread that runs the operation, with the context's scratch
// memory.

/// Executes the agreed operation. If `serving`, this rank has joined, and has neither input nor output.
void execute(Context& context, const Request& request, bool serving);

/// `bytes` is by rank.
void all_gather(Context& context, const void* input, void* output, const std::vector<std::int64_t>& bytes);

// Reductions, after all ranks agree. With every method, each element is folded over the ranks of each host by ascending
// number, then over the hosts in the order of `order_over`. Every function runs on all ranks, also on those that have
// joined.

void reduce(Context& context, const Request& request, bool serving);
/// Reduces by stripes, block by block (stripes.cpp). All ranks are contributors.
void reduce_striped(Context& context, const Request& request, const Contributors& contributors);
/// Returns the reduction within a host: for an average, a sum, since the average divides once, at the end.
inline ReduceOp within_host(ReduceOp op) noexcept { return op == ReduceOp::Average ? ReduceOp::Sum : op; }
/// Computes `to` = `factor` times `from`, rounded as a sum of one rank is.
void scale_by(double factor, DType dtype, const void* from, void* to, std::int64_t count);
/// Folds the hosts' sums into the result, divided by `divisor`; 0: into a sum of only some of the hosts.
void fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
                std::int64_t divisor, FoldOrder order = FoldOrder::Ascending);
/// Returns the sum of the hosts' sums that gives a result of 1. Residuals are kept in units of the result, since
/// weights (part of the sums if they differ, else of the divisor) may change from step to step.
float unit_of(const Request& request, std::int64_t divisor) noexcept;
/// Encodes a host's sum for sending to the other hosts; `begin` is the position of its first element.
void encode_sum(const Request& request, const float* values, std::byte* to, std::int64_t begin, std::size_t count,
                std::int64_t divisor);
/// Encodes a result for sending to the other hosts, and rounds `values` to what they will decode. Adds the rounding
/// error to the residual.
void encode_result(const Request& request, float* values, std::byte* to, std::int64_t begin, std::size_t count);
/// Returns the address in the output where the result from element `begin` on can be written directly; null if it has
/// to be assembled in scratch memory.
std::byte* destination(const Context& context, const Request& request, std::int64_t begin) noexcept;
/// Copies this rank's output from a finished chunk that was assembled in scratch memory.
void place(const Context& context, const Request& request, std::int64_t begin, std::int64_t count,
           const std::byte* result);

}  // namespace cohort::comm::hosts
