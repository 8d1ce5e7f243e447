// Collectives of GPU memory over NCCL: whether NCCL is usable for a world, which operations it supports, and NcclPlane.
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

// Data about GPUs and NCCL that the ranks of a world exchange to decide whether NCCL is usable; all ranks decide the
// same. Plain values, sent as they are between ranks of one build. Pure, any thread.
struct Card {
  std::int32_t usable = 0;  ///< the rank has NCCL and a GPU
  std::int32_t version = 0;
  std::int32_t gpu = -1;
  std::int32_t shares = 0;    ///< NCCL_MULTI_RANK_GPU_ENABLE
  std::int32_t encrypts = 0;  ///< there are several hosts, and traffic between them has to be encrypted
  std::array<unsigned char, 16> uuid{};
  NcclId id{};         ///< rank 0's id is used
  char host[64] = {};  ///< the host's name for messages, cut; not unique
  char why[256] = {};  ///< the reason if not usable
};

/// Returns the reason why these ranks cannot use NCCL; nullopt if they can.
std::optional<std::string> obstacle(std::span<const Card> cards);

/// Outcome of making the communicator on one rank.
struct Start {
  std::int32_t made = 0;
  char why[252] = {};
};
std::optional<std::string> obstacle(std::span<const Start> starts, std::span<const Card> cards);

/// Copies as much of `text` as fits.
template <std::size_t N>
void put_text(char (&to)[N], std::string_view text) noexcept {
  to[text.copy(to, N - 1)] = '\0';
}

// Collectives that NCCL supports, and how each is launched. Pure, except for the calls of NCCL; any thread.

/// True if NCCL supports the reduction, regardless of the order in which elements are folded. NCCL lacks some types,
/// bit operations, factors, and weights except in an all_reduce. Also excludes the minimum of floats, since NCCL's is
/// not NaN if a rank has NaN, and the average of integers, since NCCL does not specify how it rounds.
bool has_sum(const Request& request) noexcept;
/// True if NCCL supports this kind of operation, which moves data of any type.
bool has_move(Kind kind) noexcept;

/// NCCL's operations that sum each rank's input times its share of a weighted average.
struct ShareOps {
  double share = 1;
  NcclOp single = NcclOp::Sum;
  NcclOp twice = NcclOp::Sum;

  /// Returns the operation for a type for which `has_shares` is true.
  NcclOp of(NcclType type) const noexcept { return type == NcclType::Float32 ? single : twice; }
};

/// Owns a communicator's ShareOps: created before a group of NCCL operations, and kept until the group is in the
/// stream.
class ShareSums {
 public:
  ShareSums(const Nccl& nccl, NcclComm comm, double share) noexcept;
  ~ShareSums();
  ShareSums(const ShareSums&) = delete;
  ShareSums& operator=(const ShareSums&) = delete;

  /// Result of creating the operations.
  NcclResult result() const noexcept { return result_; }
  /// Forgets the operations, which were destroyed with the communicator.
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
  StreamMarks marks;  ///< work of the request's streams when it was made

  bool reached() const { return gpu.passed(*marks.output) && gpu.passed(*marks.input); }
};

/// Launches the request's NCCL operations. Call between ncclGroupStart and ncclGroupEnd.
NcclResult launch(const NcclWorld& world, const Request& request);
/// Launches the step's exchange in the same way.
NcclResult launch(const NcclWorld& world, const ExactStep& step);
/// True if NCCL multiplies this type by a share with the promised precision; for 16-bit floats it would round the
/// share.
bool has_shares(DType dtype) noexcept;

// A communicator's collectives of GPU memory over NCCL, if all its ranks have NCCL: owns one NCCL communicator, made
// with the first operation that NCCL may carry out, and one stream. Sums whose bits in NCCL would differ from the CPU's
// are exchanged by NCCL and folded by Cohort's kernels. Call `may_take` and `call` in the thread that calls the
// communicator, `form` and `run` in the thread that runs operations; another thread may check operations in flight, and
// any may give up. Without NCCL, operations are staged.
class NcclPlane : public std::enable_shared_from_this<NcclPlane> {
 public:
  using Clock = std::chrono::steady_clock;

  /// `hosts` has each rank's host; empty if all ranks are on one host.
  NcclPlane(rendezvous::Placement placement, std::vector<int> hosts)
      : placement_(std::move(placement)), world_{placement_.rank, placement_.size, std::move(hosts)} {}
  ~NcclPlane();
  NcclPlane(const NcclPlane&) = delete;
  NcclPlane& operator=(const NcclPlane&) = delete;

  /// True if NCCL may carry out the request. The same on all ranks for the same request.
  bool may_take(const DeviceRequest& request) const noexcept;
  /// Returns false once the ranks have agreed to stage; the same on all ranks when earlier requests are over.
  bool open() const noexcept { return state_.load(std::memory_order_acquire) != State::Staging; }
  bool ready() const noexcept { return state_.load(std::memory_order_acquire) == State::Nccl; }
  /// Makes a call for a request that `may_take` has accepted. It runs after the present work of its streams. Throws
  /// Unavailable, InvalidArgument.
  DeviceCall call(const DeviceRequest& request);
  /// Stages the call instead, and begins the copy of its input. Throws Unavailable, Internal.
  Staged stage(const DeviceCall& call);

  /// Sets up NCCL after all ranks have agreed on the first operation. Returns false if NCCL was set up before, or if
  /// the ranks stage from now on. Throws the error that ends the world.
  bool form(Gpu& gpu, Turn& turn);
  /// Queues `together` on the GPU: a group or one operation that all ranks have agreed on in `round`. Its elements have
  /// to live as long as the returned Flight. Returns null, on all ranks, if the operations have to be staged. Throws
  /// the error that ends the world.
  std::shared_ptr<Flight> run(std::span<const DeviceCall> together, const Round& round, Turn& turn);
  /// Gives up because the world has ended. Any thread.
  void give_up() noexcept;

 private:
  enum class State { Unknown, Nccl, Staging, Broken };
  enum class Folding { Unknown, Known, None };
  struct Scratch {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };
  class Given;

  Start start(const NcclId& id, Turn& turn);
  /// Provides kernels, and scratch memory for `sums`. Returns false if some rank lacks them.
  bool can_fold(std::span<const Request> sums, Turn& turn);
  std::shared_ptr<Flight> give(std::span<const DeviceCall> together, const Round& round, Turn& turn);
  struct Step;
  /// Queues one group of NCCL operations. Returns when the group is in the stream.
  void give_step(Step step, std::span<const DeviceCall> together, std::string_view what, Turn& turn);
  /// Makes the step's NCCL calls, on the NcclThread.
  NcclResult call_nccl(const Step& step, const std::optional<ShareOps>& shares);
  /// Checks a result of NCCL's functions, and the communicator's state; `calls_` has to be held.
  void check(NcclResult result, std::string_view what) const;
  /// Throws Timeout if the deadline of the operations has passed.
  void require_in_time(std::span<const DeviceCall> together, std::string_view what, Clock::time_point deadline) const;
  /// Checks of results for non-finite values; their outcome is known when these marks have passed.
  struct Look {
    std::vector<MarkPtr> there;
    std::vector<std::shared_ptr<FiniteCheck>> asked = {};
    std::shared_ptr<std::byte> flags = {};  // one per entry of `asked`; not 0 if a value is not finite
  };
  Look look_at_results(std::span<const DeviceCall> together);
  Look read_results(std::span<const Request* const> asked);
  Scratch reserve(std::size_t bytes);
  /// Returns nullopt if the communicator has been ended.
  std::optional<NcclResult> state_of_comm();
  void end_comm(bool healthy) noexcept;
  std::string where() const;

  const rendezvous::Placement placement_;
  const ExactWorld world_;
  const pid_t home_ = ::getpid();
  std::atomic<State> state_{State::Unknown};
  const Nccl* nccl_ = nullptr;
  Gpu* gpu_ = nullptr;  // used by NCCL
  std::mutex calls_;    // serializes calls of NCCL functions that do not block
  NcclComm comm_ = nullptr;
  std::unique_ptr<NcclThread> thread_;  // calls NCCL functions that may block
  const std::shared_ptr<std::atomic<bool>> calling_ = std::make_shared<std::atomic<bool>>(false);  // a call has begun
  std::optional<ShareSums> shares_;                                                                // the last ones used
  Stream stream_ = nullptr;
  Folding folding_ = Folding::Unknown;  // whether all ranks have kernels
  const FoldLauncher* folds_ = nullptr;
  std::vector<void*> reserved_;  // GPU memory, freed after the NCCL communicator
  Scratch scratch_;
  std::size_t agreed_scratch_ = 0;                                  // scratch bytes that all ranks have
  bool told_of_memory_ = false;                                     // lack of scratch memory has been reported
  Scratch flags_;                                                   // flags of non-finite results
  const std::shared_ptr<Rooms> rooms_ = std::make_shared<Rooms>();  // memory that peers do not see
};

}  // namespace cohort::comm::cuda
