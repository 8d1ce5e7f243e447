// Base of the algorithms between hosts (Context): placement, contributions of all ranks, frames, parts on this host and
// waiting; and what it keeps for large sums, their memory and the length of their pieces. Belongs to the thread that
// runs operations.
#pragma once

#include "comm/api/request.h"
#include "comm/engine/agreement.h"
#include "comm/engine/pending_work.h"
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

// How long the pieces of large sums are and how many of them are on the way, as the wire turns out to be. Each rank
// learns for itself; as all have to divide alike, each says how often it would like pieces doubled, and the least
// counts. Belongs to an engine and its thread.
class ChunkTuner {
 public:
  using Duration = std::chrono::steady_clock::duration;
  explicit ChunkTuner(const Layout& layout) noexcept;

  /// Learns that an operation has moved so many bytes of this rank's stripe each way in this time.
  void learn(std::size_t bytes, Duration took) noexcept;
  /// How often this rank would like pieces doubled, up to `most`.
  int doublings() const noexcept { return doublings_; }
  int most() const noexcept { return most_; }

  /// Bytes of a piece, on a host with several ranks of all its stripes together.
  std::size_t piece_bytes(int doublings = 0) const noexcept { return least_bytes_ << doublings; }
  /// Bytes of a sum that the ranks of a host reduce at once; for a rank that has nobody to meet there, a piece.
  std::size_t block_bytes(std::size_t sum_bytes, int doublings) const noexcept;
  /// How often pieces of a sum of so many bytes are doubled, where all ranks would like it so often. With several hosts
  /// of a rank each, data on its way back waits for whole pieces, so there are a few.
  int doublings_of(std::size_t sum_bytes, int doublings) const noexcept;
  /// How many pieces a rank may be ahead of what it has received, up to `kMostAhead`. Pieces sent further ahead than
  /// the wire needs wait in queues, and acknowledgements of the other direction wait behind them: the two directions of
  /// a link end up taking turns. With less than it needs the wire runs dry.
  /// All ranks have to be so far ahead alike, or what one sends first keeps a slower one from what it waits for.
  std::int64_t ahead(int doublings, int on_the_way) const noexcept;
  /// Number of pieces, not doubled, that a rank by itself would like to have on the way.
  int on_the_way() const noexcept;
  static constexpr std::int64_t kMostAhead = 24;

 private:
  const int hosts_;
  const int columns_;
  const bool alone_;  // one rank on each host
  const std::size_t least_bytes_;
  int most_ = 0;
  double rate_ = 0;  // bytes per second of this rank, of late
  int doublings_ = 0;
};

// Memory of large sums between hosts (stripes.cpp, sums.cpp), kept from operation to operation, so that it is touched
// once. Belongs to the thread that runs operations.

/// The elements that the ranks of a host reduce and gather at once.
struct Block {
  std::int64_t begin = 0;  // in elements of the buffer
  std::int64_t count = 0;
  std::int64_t left = 0;               // elements of the slice that have not been through the wire
  Slice slice;                         // this stripe's share, in elements of the block
  const std::byte* partial = nullptr;  // this host's sum of the slice
  std::byte* result = nullptr;         // of the slice
  std::vector<std::byte> partial_bytes, result_bytes, whole_bytes;
  std::shared_ptr<const Counts> shares;  // by local rank, elements of the block
  std::uint64_t borrowed = 0;            // until those beside this rank have read the result
};
/// The elements that go over the wire at once.
struct Piece {
  std::int64_t number = 0;
  std::int64_t block = 0;
  std::int64_t first = 0;  // in elements of the block's slice
  std::int64_t count = 0;
  bool sending = false;
  std::vector<std::byte> raw_bytes;                      // by host, their inputs to the part that this one folds
  std::vector<std::byte> coded_bytes;                    // in a wire format: what is sent, then what comes back
  std::vector<float> wide;                               // by host, as raw_bytes
  std::vector<transport::Outgoing> raw_out, folded_out;  // by host
  std::vector<transport::Incoming> raw_in, folded_in;
};
/// A chunk of what each rank keeps of a reduce_scatter.
struct Chunk {
  std::vector<std::byte> packed_bytes;  // this rank's input to it, as the host sums it
  std::vector<std::byte> sum_bytes;
  std::vector<const std::byte*> sums;    // by host, of what its rank of this stripe keeps
  std::vector<std::byte> raw_bytes;      // by host, their inputs to the part that this rank keeps
  std::vector<bool> sends;               // by host
  std::vector<transport::Outgoing> out;  // by host
  std::vector<transport::Incoming> in;
};

struct SumMemory {
  Contributors contributors;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Piece>> pieces;
  std::vector<std::unique_ptr<Chunk>> chunks;
};

/// Protects frames of an operation in the memory of a function: if it is left by an exception, the transport lets go of
/// them first. Declare it behind them.
class FrameGuard {
 public:
  explicit FrameGuard(World& world) noexcept : world_(world), exceptions_(std::uncaught_exceptions()) {}
  /// Ends the world if nothing else has. Out of memory here, too: the process ends, and its peers name it.
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

/// Steps of an operation whose frames must not be mixed up; the upper bits of their tags.
enum class Step : std::uint32_t { Info, Raw, Folded, Chain, Block, Direct, Partial };
inline std::uint32_t tag(Step step, std::int64_t index) noexcept {
  return static_cast<std::uint32_t>(step) << 28 | (static_cast<std::uint32_t>(index) & 0x0FFFFFFF);
}

// Base of the algorithms between hosts: placement, contributions of all ranks, frames that are sent and received, parts
// that the ranks of this host carry out, and waiting for all of these, within deadlines and while peers live. Belongs
// to the thread that runs operations.
class Context {
 public:
  using Clock = std::chrono::steady_clock;

  Context(World& world, Waiters& waiters, std::function<void()> meanwhile);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  World& world;
  const Layout& layout;
  local::Context& local;  ///< of the ranks of this host
  transport::Transport& transport;
  /// Payloads up to here may go to all hosts at once, inline.
  const std::size_t inline_bytes;
  /// The limit for sums in the next round, higher between ranks by themselves on a fast wire, if sending data more than
  /// once takes no longer than the round trips it saves. All ranks know it alike from their last round.
  std::size_t sum_inline_bytes() const noexcept;
  static constexpr std::size_t kMostInline = std::size_t{64} << 10;
  ChunkTuner tuner;
  SumMemory memory;

  // State of the running operation:
  std::uint64_t sequence = 0;
  Agreement agreement;     ///< all ranks' contributions
  int pieces_doubled = 0;  ///< how often
  int on_the_way = 0;      ///< undoubled pieces
  bool over = false;       ///< all ranks have come to it

  /// The next operation: its number is `sequence`.
  void begin(const Descriptor& own, Clock::time_point called, std::chrono::milliseconds timeout);
  /// It is over: nobody waits in it.
  void end() noexcept { lane_.end(sequence); }

  /// Drives the transport until `ready()`. `missing()` gives the ranks that are waited for.
  template <class Ready, class Missing>
  void wait(Ready ready, Missing missing);
  /// Looks after the others once, and drives the transport, for an operation that is carried out elsewhere.
  void attend();
  void wait_for(transport::Incoming& frame);
  void wait_for(transport::Outgoing& frame);
  void send(transport::Outgoing& frame, int peer, std::uint32_t tag, const void* data, std::size_t bytes);
  void receive(transport::Incoming& frame, int peer, std::uint32_t tag, void* to, std::size_t room);

  /// Runs a part that all ranks of this host carry out together. While this rank waits for them it goes on driving the
  /// transport: another host may need that first.
  template <class Body>
  void with_neighbours(Body body);
  /// An operation of the local world as a part.
  void run_local(const Request& request);
  void local_broadcast(int root, void* data, std::size_t bytes);

  /// Memory aside, of at least so many bytes.
  std::vector<std::byte>& scratch(std::size_t which, std::size_t bytes);

  // Costs of the operation so far:
  std::chrono::nanoseconds blocked{0};  ///< sending, on frames and behind those beside this rank
  std::size_t wire_bytes = 0;           ///< sent

 private:
  static constexpr auto kLook = std::chrono::milliseconds(10);      // between looks at lives and deadlines
  static constexpr auto kSpinning = std::chrono::microseconds(50);  // at most, then the core is offered to others
  static constexpr auto kLeastSpinning = std::chrono::microseconds(2);
  static constexpr auto kYielding = std::chrono::microseconds(2000);  // then it sleeps; a few blocks' time on a wire
  static constexpr auto kTelling = std::chrono::microseconds(300);    // the status page says so of longer waits
  static constexpr auto kTaken = std::chrono::microseconds(1000);     // delay with which an offered core came back
  static constexpr auto kBusy = std::chrono::milliseconds(50);        // for which it sleeps at once then

  /// Says in the status page that the program waits for others in this operation, for as long as it lives.
  class Waiting {
   public:
    explicit Waiting(Context& context) : context_(context), since_(Clock::now()) {}
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Clock::time_point since() const noexcept { return since_; }
    /// It has become long, or goes on.
    void tell() noexcept;

   private:
    Context& context_;
    const Clock::time_point since_;
    bool told_ = false;
  };

  void look_after(const std::function<std::vector<int>()>& missing);
  void while_with_neighbours();
  Clock::time_point deadline_of(const std::vector<int>& missing) const noexcept;
  void note_away(bool away) const noexcept {
    world.local_world().state(layout.local).away.store(away ? 1 : 0, std::memory_order_relaxed);
  }
  std::string omission(const std::vector<int>& missing) const;
  /// True if the operation, whose round is over, may move objects; a round's descriptions only say what it moves.
  bool moves_objects() const noexcept { return over && may_be_object(agreement.agreed.dtype); }

  status::LaneStatus& lane_;
  Waiters& waiters_;
  const std::function<void()> meanwhile_;
  Clock::time_point looked_{};
  Clock::time_point busy_until_{};
  Clock::duration spinning_ = kSpinning;
  Waiting* here_ = nullptr;    // for those beside this rank
  Clock::time_point drove_{};  // the transport, while it waits for them
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
  blocked += local.take_waited();
}

template <class Ready, class Missing>
void Context::wait(Ready ready, Missing missing) {
  if (ready()) return;
  const bool spins = waiters_.attended.load(std::memory_order_relaxed) > 0 && !world.local_world().crowded();
  Waiting waiting(*this);
  const auto since = waiting.since();
  bool away = false;  // the ranks beside this one can see that it waits for another host
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
      // Others make more of the core: a thread that wakes comes before one that has yielded.
      if (Clock::now() - now > kTaken) busy_until_ = now + kBusy;
    }
    if (now - looked_ >= kLook) {
      looked_ = now;
      if (!away) note_away(true);
      away = true;
      if (!ready()) look_after(missing);
    }
  }
  // The awaited rank may share the core, and comes when this thread yields: spinning before that is lost time.
  if (yields == 0 && !slept) spinning_ = std::min<Clock::duration>(spinning_ * 2, kSpinning);
  if (yields == 1 || yields == 2) spinning_ = std::max<Clock::duration>(spinning_ / 2, kLeastSpinning);
  if (away) note_away(false);
  blocked += Clock::now() - since;
}

// Phases of an operation between hosts, once its ranks have called it: a round, then sums or moves. The functions run
// on all ranks, on the thread that runs the operation.

// Rounds: how all ranks learn the others' descriptions, and come to one decision before anything is delivered. Small
// sums travel along. The functions run on all ranks, on the thread that runs the operation.

/// Outcome of the last round, beside the context's `agreement` and `pieces_doubled`; its memory is kept.
struct Round {
  std::chrono::nanoseconds waited{0};   ///< for others to come to the operation
  bool delivered = false;               ///< the result came with the round
  bool agreed_here = false;             ///< ranks of this host describe the same, without weights
  std::vector<Descriptor> here_brings;  ///< one if they agree, else all of them
  std::vector<std::byte> info;
  std::vector<std::vector<std::byte>> infos;  ///< by host
  std::vector<std::byte> small;               ///< a decision, and the result behind it
  std::vector<float> residual;                ///< the request's, as it is to be if the result comes with the round
};

/// `request` is null on a rank that has joined.
void meet_all(Context& context, Round& round, const Request* request, const Descriptor& own);
/// The ranks' disagreement, as this one sees it.
std::optional<Disagreement> disagreement(const Context& context);
/// Compares what ranks send in an all_to_all_v with what is expected.
std::optional<Disagreement> compare_counts(Context& context, const Request& request);
/// Throws Mismatch, or what has ended the world.
void refuse_if(const Context& context, std::optional<Disagreement> found);

// Execution, once all ranks agree: sums (below), and operations that only move data. Between hosts each byte goes once
// to each host that needs it. The functions run on all ranks, on the thread that runs the operation; additional memory
// is the context's.

/// The operation that all have agreed on. `serving`: this rank has joined, and has neither input nor output.
void execute(Context& context, const Request& request, bool serving);

/// `bytes` is by rank.
void all_gather(Context& context, const void* input, void* output, const std::vector<std::int64_t>& bytes);

// Reductions, once all ranks agree: each element is folded over the ranks of each host by ascending number, then over
// the hosts by ascending number, whatever the method. Every function runs on all ranks, also on those that have joined.

void reduce(Context& context, const Request& request, bool serving);
/// Reduces by stripes, block by block (stripes.cpp). All ranks are contributors.
void reduce_striped(Context& context, const Request& request, const Contributors& contributors);
/// Reduction of the inputs within a host; an average divides once, at the end.
inline ReduceOp within_host(ReduceOp op) noexcept { return op == ReduceOp::Average ? ReduceOp::Sum : op; }
/// `to` = `factor` times `from`, rounded as a sum of one rank is.
void scale_by(double factor, DType dtype, const void* from, void* to, std::int64_t count);
/// The hosts' sums to the result.
void fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
                std::int64_t divisor);
/// The hosts' sums that a result of 1 stands for. Residuals are in units of the result: weights, which go into the sums
/// where they differ and the divisor where they do not, may change from step to step.
float unit_of(const Request& request, std::int64_t divisor) noexcept;
/// A host's sum as it goes to the other hosts, of which `begin` is the first element.
void encode_sum(const Request& request, const float* values, std::byte* to, std::int64_t begin, std::size_t count,
                std::int64_t divisor);
/// A result, as it goes back to them, and as they will have it. The rounding error goes into the residual.
void encode_result(const Request& request, float* values, std::byte* to, std::int64_t begin, std::size_t count);
/// Address to which the result of an element goes directly; null: it is put together aside.
std::byte* destination(const Context& context, const Request& request, std::int64_t begin) noexcept;
/// Takes what this rank is to have of a finished chunk that was put together aside.
void place(const Context& context, const Request& request, std::int64_t begin, std::int64_t count,
           const std::byte* result);

}  // namespace cohort::comm::hosts
