// Runs one collective after the other over ranks on several hosts. Every operation begins with a round, in which all
// ranks learn what all others bring; disagreement is refused by all of them before any result is delivered. Then data
// goes by way of the local world inside hosts and of the transport between them (docs/design/hosts.md). One thread at a
// time runs operations. After a failure other than Mismatch the world has ended.
#pragma once

#include "comm/control/agreement.h"
#include "comm/control/operation.h"
#include "comm/control/waiters.h"
#include "comm/hosts/chunk_tuner.h"
#include "comm/hosts/world.h"
#include "comm/kernels/fold.h"
#include "comm/local/slices.h"

#include <cohort/error.h>
#include <cohort/observer.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::comm::hosts {

/// Where frames of an operation lie, in the memory of a function: if it is left by an exception, the transport lets go
/// of them first. Declare it behind them.
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

class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  Engine(World& world, Waiters& waiters, std::function<void()> meanwhile);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// All of an operation. Throws Mismatch (and the engine may be used again) or what ended the world.
  void run(const Request& request, Clock::time_point called, CollectiveEvent* event);
  /// Serves the others' operations until all ranks have joined; `patience` is for each of them.
  int join(std::chrono::milliseconds patience);
  /// What is under way may not wait longer than this: operations behind it have deadlines too. Any thread.
  void limit_waiting(Clock::time_point deadline) noexcept {
    limit_.store(deadline.time_since_epoch().count(), std::memory_order_relaxed);
    local_.limit_waiting(deadline);
  }

 private:
  static constexpr auto kLook = std::chrono::milliseconds(10);      // between looks at lives and deadlines
  static constexpr auto kSpinning = std::chrono::microseconds(50);  // at most, then the core is offered to others
  static constexpr auto kLeastSpinning = std::chrono::microseconds(2);
  static constexpr auto kYielding = std::chrono::microseconds(2000);  // then it sleeps; a few blocks' time on a wire
  static constexpr auto kTelling = std::chrono::microseconds(300);    // the status page says so of longer waits
  static constexpr auto kTaken = std::chrono::microseconds(1000);     // who offered the core got it back so late
  static constexpr auto kBusy = std::chrono::milliseconds(50);        // for which it sleeps at once then
  using Slice = local::Slice;

  /// Steps of an operation whose frames must not be mixed up; the upper bits of their tags.
  enum class Step : std::uint32_t { Info, Raw, Folded, Chain, Block, Direct, Partial };
  static std::uint32_t tag(Step step, std::int64_t index) noexcept {
    return static_cast<std::uint32_t>(step) << 28 | (static_cast<std::uint32_t>(index) & 0x0FFFFFFF);
  }
  struct InfoHeader {
    static constexpr std::uint16_t kUniform = 1;
    std::uint32_t ranks = 0;
    std::uint16_t flags = 0;
    std::uint16_t doublings = 0;  // that this host's leader would like
    std::uint64_t payload = 0;
  };
  /// From the leader to its host.
  struct Decision {
    std::uint64_t uniform = 0;
    std::uint64_t doublings = 0;
  };

  /// Which ranks are folded, and by what each is multiplied first.
  struct Members {
    std::vector<bool> folded;    // by rank
    std::vector<double> scales;  // by rank; empty: none
    std::int64_t count = 0;
    std::int64_t divisor = 0;  // of an average
    bool everyone = true;
  };

  /// What the ranks of a host reduce and gather at once.
  struct Block {
    std::int64_t begin = 0;  // in elements of the buffer
    std::int64_t count = 0;
    std::int64_t left = 0;               // elements of the slice that have not been through the wire
    Slice slice;                         // this column's share, in elements of the block
    const std::byte* partial = nullptr;  // this host's sum of the slice
    std::byte* result = nullptr;         // of the slice
    std::vector<std::byte> partial_bytes, result_bytes, whole_bytes;
    std::shared_ptr<const Counts> shares;  // by local rank, elements of the block
    std::uint64_t lent = 0;                // until those beside this rank have read the result
  };
  /// What goes over the wire at once.
  struct Piece {
    std::int64_t number = 0;
    std::int64_t block = 0;
    std::int64_t first = 0;  // in elements of the block's slice
    std::int64_t count = 0;
    bool sending = false;
    std::vector<std::byte> raw_bytes;                      // by host, what they bring to the part that this one folds
    std::vector<std::byte> narrow_bytes;                   // as bfloat16: what is sent, then what comes back
    std::vector<float> wide;                               // by host, as raw_bytes
    std::vector<transport::Outgoing> raw_out, folded_out;  // by host
    std::vector<transport::Incoming> raw_in, folded_in;
  };
  /// A stretch of what each rank keeps of a reduce_scatter.
  struct Stretch {
    std::vector<std::byte> packed_bytes;  // what this rank brings to it, as the host sums it
    std::vector<std::byte> sum_bytes;
    std::vector<const std::byte*> sums;    // by host, of what its rank of this column keeps
    std::vector<std::byte> raw_bytes;      // by host, what they bring to what this rank keeps
    std::vector<bool> sends;               // by host
    std::vector<transport::Outgoing> out;  // by host
    std::vector<transport::Incoming> in;
  };
  // While a block is on the wire, so many behind it are reduced and have begun.
  static constexpr std::int64_t kBlocksAhead = 2;
  Block& block_at(std::int64_t number) { return *blocks_[static_cast<std::size_t>(number % (kBlocksAhead + 1))]; }
  Piece& piece_at(std::int64_t number) { return *pieces_[static_cast<std::size_t>(number % ahead_)]; }
  struct Columns;
  struct Parts;

  /// Says in the status page that the program waits for others in this operation, for as long as it lives.
  class Waiting {
   public:
    explicit Waiting(Engine& engine) : engine_(engine), since_(Clock::now()) {}
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Clock::time_point since() const noexcept { return since_; }
    /// It has become long, or goes on.
    void tell() noexcept;

   private:
    Engine& engine_;
    const Clock::time_point since_;
    bool told_ = false;
  };

  // engine.cpp: waiting
  void announce(const Descriptor& own) noexcept;
  template <class Ready, class Missing>
  void wait(Ready ready, Missing missing);
  void look_after(const std::function<std::vector<int>()>& missing);
  void wait_for(transport::Incoming& frame);
  void wait_for(transport::Outgoing& frame);
  template <class Body>
  void with_neighbours(Body body);
  void while_with_neighbours();
  void run_local(const Request& request);
  Clock::time_point deadline() const noexcept;
  Clock::time_point deadline_of(const std::vector<int>& missing) const noexcept;
  void note_away(bool away) const noexcept {
    world_.local_world().state(layout_.local).away.store(away ? 1 : 0, std::memory_order_relaxed);
  }
  std::string omission(const std::vector<int>& missing) const;
  /// Of the operation whose round is over: descriptions say only what is brought, and any two ranks may exchange them.
  bool moves_objects() const noexcept { return over_ && may_be_object(round_.agreed.dtype); }
  void send(transport::Outgoing& frame, int peer, std::uint32_t tag, const void* data, std::size_t bytes);
  void receive(transport::Incoming& frame, int peer, std::uint32_t tag, void* to, std::size_t room);
  Request local_request(Kind kind, DType dtype) const;
  void local_broadcast(int root, void* data, std::size_t bytes);
  void meet(const Request* request, const Descriptor& own);

  // engine_round.cpp
  void round(const Request* request, const Descriptor& own);
  bool beside(const Request& request) const noexcept;
  bool folds_in_place(const Request& request) const noexcept;
  void exchange_infos(const Request* request, const Descriptor& own, const std::byte* payload);
  bool take_info(int host, std::string_view bytes, const Descriptor& own);
  void settle(const Descriptor& own);
  std::optional<Disagreement> disagreement() const;
  std::optional<Disagreement> compare_counts(const Request& request);
  void refuse_if(std::optional<Disagreement> found) const;
  const std::byte* small_partial(const Request& request);

  // engine_sums.cpp
  Members members_of(const Request& request) const;
  void reduce(const Request& request, bool serving);
  void reduce_gathered(const Request& request, const Members& members, bool serving);
  void fold_hosts(const Request& request, const std::vector<const void*>& partials, void* to, std::int64_t count,
                  std::int64_t divisor);
  void place(const Request& request, std::int64_t begin, std::int64_t count, const std::byte* result) const;
  std::byte* destination(const Request& request, std::int64_t begin) const noexcept;

  // engine_columns.cpp
  void reduce_columns(const Request& request, const Members& members);
  void reduce_block(Columns& way, std::int64_t number);
  void exchange_block(Columns& way, std::int64_t number);
  void deliver_block(Columns& way, std::int64_t number);
  void finish_lending(Block& block);
  void begin_pieces(Columns& way);
  void begin_piece(Columns& way);
  void fold_piece(Columns& way);
  void finish_piece(Columns& way);
  void finish_sending(Piece& piece);
  Slice part_of_piece(const Piece& piece, std::size_t element, int host) const noexcept;

  // engine_parts.cpp
  bool goes_by_parts(const Request& request) const;
  void reduce_parts(const Request& request, const Members& members);
  Stretch& stretch_at(const Parts& way, std::int64_t number) noexcept;
  void begin_stretch(Parts& way);
  void sum_stretch(const Parts& way, Stretch& stretch, std::int64_t number);
  void fold_stretch(const Parts& way, std::int64_t number);
  void finish_sending(Stretch& stretch);

  // engine_moves.cpp
  void execute(const Request& request, bool serving);
  void broadcast(const Request& request, bool serving);
  void all_gather(const void* input, void* output, const std::vector<std::int64_t>& bytes);
  void gather(const Request& request, const std::vector<std::int64_t>& bytes);
  void scatter(const Request& request, const std::vector<std::int64_t>& bytes);
  void all_to_all(const Request& request);
  std::vector<std::byte>& scratch(std::size_t which, std::size_t bytes);

  World& world_;
  const Layout& layout_;
  local::Engine& local_;
  transport::Transport& transport_;
  status::LaneStatus& lane_;
  const Waiters& waiters_;
  const std::function<void()> meanwhile_;
  std::size_t beside_bytes_ = 0;
  ChunkTuner tuner_;

  std::uint64_t sequence_ = 0;
  Clock::time_point called_{};
  std::chrono::milliseconds timeout_{0};
  std::atomic<Clock::rep> limit_{std::numeric_limits<Clock::rep>::max()};
  Clock::time_point looked_{};
  Clock::time_point busy_until_{};
  Clock::duration spinning_ = kSpinning;
  std::chrono::nanoseconds waited_{0};   // for others to come to the operation
  std::chrono::nanoseconds blocked_{0};  // sending, on frames and behind those beside this rank, since they have come
  Waiting* here_ = nullptr;              // for those beside this rank
  Clock::time_point drove_{};            // the transport, while it waits for them
  std::size_t wire_bytes_ = 0;           // sent in this operation
  Agreement round_;
  int pieces_doubled_ = 0;               // how often, in this operation
  bool delivered_ = false;               // the result came with the round
  bool over_ = false;                    // all ranks have come to the operation
  bool agreed_here_ = false;             // those of this host bring the same, without weights
  std::vector<Descriptor> here_brings_;  // one if they agree, else all of them
  std::vector<std::byte> info_;
  std::vector<std::vector<std::byte>> infos_;  // by host
  std::vector<std::byte> small_;               // a decision, and the result behind it
  std::vector<std::vector<std::byte>> scratch_;
  std::vector<std::unique_ptr<Block>> blocks_;  // kept, so that memory is touched once
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::vector<std::unique_ptr<Stretch>> stretches_;
  std::int64_t ahead_ = 1;  // pieces that may be on the wire at once, in this operation
  std::vector<const void*> partials_;
};

/// Runs a part that all ranks of this host carry out together. While this rank waits for them it goes on driving the
/// transport: another host may need that first.
template <class Body>
void Engine::with_neighbours(Body body) {
  if (layout_.locals == 1) return;
  Waiting waiting(*this);
  here_ = &waiting;
  drove_ = waiting.since();
  try {
    body();
  } catch (const Error&) {
    here_ = nullptr;
    world_.tell_if_ended();  // before frames of this operation go out of scope
    throw;
  }
  here_ = nullptr;
  blocked_ += local_.take_waited();
}

/// Drives the transport until `ready()`. `missing()` gives the ranks that are waited for.
template <class Ready, class Missing>
void Engine::wait(Ready ready, Missing missing) {
  if (ready()) return;
  const bool spins = waiters_.attended.load(std::memory_order_relaxed) > 0 && !world_.local_world().crowded();
  Waiting waiting(*this);
  const auto since = waiting.since();
  bool away = false;  // those beside this rank can see that it waits for another host
  int yields = 0;
  bool slept = false;
  while (!ready()) {
    if (world_.ended()) world_.throw_ended();
    const auto now = Clock::now();
    const bool awake =
        waiters_.attended.load(std::memory_order_relaxed) > 0 && now - since < kYielding && now > busy_until_;
    if (now - since >= kTelling) waiting.tell();
    if (!awake) {
      slept = true;
      transport_.sleep(kLook);
    } else if (!transport_.progress() && (!spins || now - since > spinning_)) {
      ++yields;
      ::sched_yield();
      // Others make more of the core: whoever wakes comes before whoever has yielded.
      if (Clock::now() - now > kTaken) busy_until_ = now + kBusy;
    }
    if (now - looked_ >= kLook) {
      looked_ = now;
      if (!away) note_away(true);
      away = true;
      if (!ready()) look_after(missing);
    }
  }
  // Who is waited for may share the core, and comes when this thread yields: spinning before that is lost time.
  if (yields == 0 && !slept) spinning_ = std::min<Clock::duration>(spinning_ * 2, kSpinning);
  if (yields == 1 || yields == 2) spinning_ = std::max<Clock::duration>(spinning_ / 2, kLeastSpinning);
  if (away) note_away(false);
  blocked_ += Clock::now() - since;
}

}  // namespace cohort::comm::hosts
