// Collectives of GPU memory over NCCL: whether it serves the ranks, which of them it has, and a communicator's own.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/api/request.h"
#include "comm/engine/queue.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/exact_sums.h"
#include "comm/gpu/fold_launcher.h"
#include "comm/gpu/in_flight.h"
#include "comm/gpu/nccl.h"
#include "comm/gpu/nccl_thread.h"
#include "comm/gpu/peer_buffers.h"
#include "comm/gpu/staging.h"
#include "rendezvous/identity.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::cuda {

// Exchange between the ranks of a world about their GPUs and their NCCL, and whether NCCL serves them: the same answer
// on all of them. Plain values of one layout, which travel between the ranks of one build; pure, any thread.
struct Card {
  std::int32_t usable = 0;  ///< it has NCCL and a GPU
  std::int32_t version = 0;
  std::int32_t gpu = -1;
  std::int32_t shares = 0;    ///< NCCL_MULTI_RANK_GPU_ENABLE
  std::int32_t encrypts = 0;  ///< what it sends to other hosts, and there are any
  std::int32_t ipc = 0;       ///< COHORT_GPU_IPC
  std::array<unsigned char, 16> uuid{};
  NcclId id{};         ///< rank 0's
  char host[64] = {};  ///< its name for messages, cut; two hosts may have one
  char why[256] = {};  ///< where it is not usable
};

/// Reason why NCCL does not serve these ranks; nullopt if it does.
std::optional<std::string> obstacle(std::span<const Card> cards);

/// How it went, on each rank, to make its communicator.
struct Start {
  std::int32_t made = 0;
  char why[252] = {};
};
std::optional<std::string> obstacle(std::span<const Start> starts, std::span<const Card> cards);

/// Copies as much of it as fits.
template <std::size_t N>
void put_text(char (&to)[N], std::string_view text) noexcept {
  to[text.copy(to, N - 1)] = '\0';
}

// Collectives that NCCL carries out, and how each is given to it. Pure, but for the calls of NCCL; any thread.

/// A reduction that NCCL has, but for the order in which elements are folded: not those of types it lacks, nor bit
/// operations, factors, and weights but those of an all_reduce; nor the minimum of floats, which it does not make NaN
/// where a rank has NaN, nor the average of integers, whose rounding it does not promise.
bool has_sum(const Request& request) noexcept;
/// An operation that moves data, of whatever type.
bool has_move(Kind kind) noexcept;

/// NCCL's operations that sum each rank's input times its share of a weighted average.
struct ShareOps {
  double share = 1;
  NcclOp single = NcclOp::Sum;
  NcclOp twice = NcclOp::Sum;

  /// The operation for a type that has_shares.
  NcclOp of(NcclType type) const noexcept { return type == NcclType::Float32 ? single : twice; }
};

/// A communicator's ShareOps: made before a group of NCCL's operations, and kept until NCCL has it in its stream.
class ShareSums {
 public:
  ShareSums(const Nccl& nccl, NcclComm comm, double share) noexcept;
  ~ShareSums();
  ShareSums(const ShareSums&) = delete;
  ShareSums& operator=(const ShareSums&) = delete;

  /// Result of creating the operations.
  NcclResult result() const noexcept { return result_; }
  /// The communicator has gone, and they with it.
  void forget() noexcept { ops_.single = ops_.twice = NcclOp::Sum; }
  const ShareOps& ops() const noexcept { return ops_; }

 private:
  const Nccl& nccl_;
  const NcclComm comm_;
  ShareOps ops_;
  NcclResult result_;
};

struct NcclWorld {
  const Nccl& nccl;
  NcclComm comm = nullptr;
  Stream stream = nullptr;
  int rank = 0;
  int size = 1;
  /// Operations of a weighted average. If this rank's share is 0, its input and output are zero already.
  std::optional<ShareOps> shares = std::nullopt;
};

/// An operation that NCCL may carry out.
struct DeviceCall {
  DeviceRequest request;
  Gpu& gpu;
  StreamMarks marks;  ///< what its streams had when it was asked for

  bool reached() const { return gpu.passed(*marks.output) && gpu.passed(*marks.input); }
};

/// Gives it to NCCL; between ncclGroupStart and ncclGroupEnd.
NcclResult launch(const NcclWorld& world, const Request& request);
/// Launches the step's exchange, likewise.
NcclResult launch(const NcclWorld& world, const ExactStep& step);
/// True if NCCL multiplies this type by a share as precisely as is promised; for halves it would round the share.
bool has_shares(DType dtype) noexcept;

// A communicator's collectives of GPU memory over NCCL, where all its ranks have it: one communicator of NCCL's, made
// with the first operation that NCCL may carry out, and a stream of its own. Sums that NCCL does not do as the CPU does
// are exchanged by it and folded by kernels of ours. `may_take` and `call` in the thread that calls the communicator,
// `form` and `run` in the one that runs operations; another may look at what is in flight, and any may give up. If NCCL
// does not serve, small sums go by PeerBuffers, if all ranks have them, and the rest by staging.
class NcclPlane : public std::enable_shared_from_this<NcclPlane> {
 public:
  using Clock = std::chrono::steady_clock;

  /// `hosts`: by rank; empty: all are on one.
  NcclPlane(rendezvous::Placement placement, std::vector<int> hosts)
      : placement_(std::move(placement)), world_{placement_.rank, placement_.size, std::move(hosts)} {}
  ~NcclPlane();
  NcclPlane(const NcclPlane&) = delete;
  NcclPlane& operator=(const NcclPlane&) = delete;

  /// True if NCCL may carry the request out. The same on all ranks that ask for the same.
  bool may_take(const DeviceRequest& request) const noexcept;
  /// False: the ranks have agreed to stage this. The same on all of them, once what was asked for before is over.
  /// `fits`: it would go by PeerBuffers.
  bool open(bool fits) const noexcept {
    const State state = state_.load(std::memory_order_acquire);
    return state != State::Staging && (state != State::Peers || fits);
  }
  bool ready() const noexcept { return state_.load(std::memory_order_acquire) == State::Nccl; }
  /// A request that it may take. It comes after what its streams have now. Throws Unavailable, InvalidArgument.
  DeviceCall call(const DeviceRequest& request);
  /// The same by staging; the copy of its input begins. Throws Unavailable, Internal.
  Staged stage(const DeviceCall& call);

  /// Sets up NCCL for its first operation, once all ranks have agreed on that, or the substitute. False: NCCL is set
  /// up, or the ranks do without it from now on. Throws what ends the world.
  bool form(Gpu& gpu, Turn& turn);
  /// Gives the GPU `together`, a group or one operation, which live as long as what is returned: all ranks have agreed
  /// on them in `round`. `fits`: as for `open`. Null: they go by staging, on all ranks. Throws what ends the world.
  std::shared_ptr<Flight> run(std::span<const DeviceCall> together, bool fits, const Round& round, Turn& turn);
  /// The world has ended. Any thread.
  void give_up() noexcept;

 private:
  enum class State { Unknown, Nccl, Peers, Staging, Broken };
  enum class Folding { Unknown, Known, None };
  struct Scratch {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };
  class Given;

  Start start(const NcclId& id, Turn& turn);
  /// Kernels, and scratch memory for these sums. False: some rank lacks them.
  bool can_fold(std::span<const Request> sums, Turn& turn);
  std::shared_ptr<Flight> give(std::span<const DeviceCall> together, const Round& round, Turn& turn);
  std::shared_ptr<Flight> fold_at_peers(std::span<const DeviceCall> together, const Round& round, Turn& turn);
  struct Step;
  /// One group of NCCL's. Returns once it is in the stream.
  void give_step(Step step, std::span<const DeviceCall> together, std::string_view what, Turn& turn);
  /// Gives the step to the communicator, on the thread for that.
  NcclResult call_nccl(const Step& step, const std::optional<ShareOps>& shares);
  /// Checks results of NCCL's functions, and of its communicator while `calls_` is held.
  void check(NcclResult result, std::string_view what) const;
  /// Throws Timeout if they should be over.
  void require_in_time(std::span<const DeviceCall> together, std::string_view what, Clock::time_point deadline) const;
  /// Checks of results, which are known once these marks are passed.
  struct Look {
    std::vector<MarkPtr> there;
    std::vector<std::shared_ptr<FiniteCheck>> asked = {};
    std::shared_ptr<std::byte> flags = {};  // by what is asked: not 0 if something is not finite
  };
  Look look_at_results(std::span<const DeviceCall> together);
  Look read_results(std::span<const Request* const> asked);
  Scratch reserve(std::size_t bytes);
  /// Nullopt: it has been ended.
  std::optional<NcclResult> state_of_comm();
  void end_comm(bool healthy) noexcept;
  std::string where() const;

  const rendezvous::Placement placement_;
  const ExactWorld world_;
  const pid_t home_ = ::getpid();
  std::atomic<State> state_{State::Unknown};
  const Nccl* nccl_ = nullptr;
  Gpu* gpu_ = nullptr;  // that NCCL uses, or PeerBuffers
  std::mutex calls_;    // of NCCL's functions that return at once: one thread at a time
  NcclComm comm_ = nullptr;
  std::unique_ptr<NcclThread> thread_;  // of those that may block
  const std::shared_ptr<std::atomic<bool>> calling_ = std::make_shared<std::atomic<bool>>(false);  // one has begun
  std::optional<ShareSums> shares_;  // that were last needed
  Stream stream_ = nullptr;
  Folding folding_ = Folding::Unknown;  // whether all have kernels
  const FoldLauncher* folds_ = nullptr;
  std::vector<void*> reserved_;  // memory of the GPU; given back after NCCL is
  Scratch scratch_;
  std::size_t agreed_scratch_ = 0;  // bytes that all have
  bool told_of_memory_ = false;     // that it is not there
  std::shared_ptr<PeerBuffers> peers_;
  Scratch flags_;                                                   // of results that are not finite
  const std::shared_ptr<Rooms> rooms_ = std::make_shared<Rooms>();  // of memory that peers do not see
};

}  // namespace cohort::comm::cuda
