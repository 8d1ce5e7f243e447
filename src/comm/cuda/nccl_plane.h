// A communicator's collectives of GPU memory over NCCL, where all its ranks have it: one communicator of NCCL's, made
// with the first operation that NCCL may carry out, and a stream of its own. What NCCL does not sum as the CPU does is
// exchanged by it and folded by kernels of ours. `may_take` and `call` in the thread that calls the communicator,
// `form` and `run` in the one that runs operations; another may look at what is in flight, and any may give up. Where
// NCCL does not serve, all ranks go by staging.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/cuda/cards.h"
#include "comm/cuda/exact_sums.h"
#include "comm/cuda/fold_launcher.h"
#include "comm/cuda/nccl_operations.h"
#include "comm/cuda/staging.h"
#include "comm/device_op.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::comm::cuda {

class NcclPlane : public std::enable_shared_from_this<NcclPlane> {
 public:
  using Clock = DeviceOp::Clock;

  /// `hosts`: by rank; empty: all are on one.
  NcclPlane(cluster::Placement placement, std::vector<int> hosts)
      : placement_(std::move(placement)), world_{placement_.rank, placement_.size, std::move(hosts)} {}
  ~NcclPlane();
  NcclPlane(const NcclPlane&) = delete;
  NcclPlane& operator=(const NcclPlane&) = delete;

  /// Whether NCCL may be what carries it out. The same on all ranks that ask for the same.
  bool may_take(const Request& request) const noexcept;
  /// Whether NCCL is, or is still to be, what carries operations out.
  bool open() const noexcept { return state_.load(std::memory_order_acquire) != State::Staging; }
  bool ready() const noexcept { return state_.load(std::memory_order_acquire) == State::Nccl; }
  /// A request that it may take. It comes after what its streams have now. Throws Unavailable, InvalidArgument.
  std::shared_ptr<DeviceOp> call(const Request& request);

  /// As of DeviceOp.
  void give_up() noexcept;
  bool form(Gpu& gpu, DeviceOp::Ranks& ranks);
  std::shared_ptr<DeviceOp::InFlight> run(std::span<const Request> together, const Round& round,
                                          DeviceOp::Ranks& ranks);

 private:
  enum class State { Unknown, Nccl, Staging, Broken };
  enum class Folding { Unknown, Known, None };
  struct Scratch {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };
  class Call;
  class Flight;

  Start start(const NcclId& id, DeviceOp::Ranks& ranks);
  /// Kernels, and scratch memory for these sums. False: some rank lacks them.
  bool can_fold(std::span<const Request> sums, DeviceOp::Ranks& ranks);
  std::shared_ptr<DeviceOp::InFlight> give(std::span<const Request> together, const Round& round,
                                           DeviceOp::Ranks& ranks);
  struct Step;
  /// One group of NCCL's.
  void give_step(const Step& step, std::string_view what);
  /// Returns once what NCCL was given is in the stream.
  void wait_until_given(std::span<const Request> together, std::string_view what, DeviceOp::Ranks& ranks);
  static const Call& call_of(const Request& request);
  /// Of NCCL's functions, and of its communicator while `calls_` is held.
  void check(NcclResult result, std::string_view what) const;
  /// Throws Timeout if they should be over.
  void require_in_time(std::span<const Request> together, std::string_view what, Clock::time_point deadline) const;
  /// What becomes known of results once these marks are passed.
  struct Look {
    std::vector<MarkPtr> there;
    std::vector<std::shared_ptr<FiniteCheck>> asked = {};
    std::shared_ptr<std::byte> flags = {};  // by what is asked: not 0 if something is not finite
  };
  Look look_at_results(std::span<const Request> together);
  Look read_results(std::span<const Request* const> asked);
  Scratch reserve(std::size_t bytes);
  /// Nullopt: it has been ended.
  std::optional<NcclResult> state_of_comm();
  void end_comm(bool healthy) noexcept;
  std::string where() const;

  const cluster::Placement placement_;
  const ExactWorld world_;
  const pid_t home_ = ::getpid();
  std::atomic<State> state_{State::Unknown};
  const Nccl* nccl_ = nullptr;
  Gpu* gpu_ = nullptr;  // that NCCL uses
  std::mutex calls_;    // of NCCL's functions of the communicator: one thread at a time
  NcclComm comm_ = nullptr;
  std::optional<ShareSums> shares_;  // that were last needed
  Stream stream_ = nullptr;
  Folding folding_ = Folding::Unknown;  // whether all have kernels
  const FoldLauncher* folds_ = nullptr;
  std::vector<void*> reserved_;  // memory of the GPU; given back after NCCL is
  Scratch scratch_;
  std::size_t agreed_scratch_ = 0;                                  // bytes that all have
  bool told_of_memory_ = false;                                     // that it is not there
  Scratch flags_;                                                   // of results that are not finite
  const std::shared_ptr<Rooms> rooms_ = std::make_shared<Rooms>();  // of memory that peers do not see
};

}  // namespace cohort::comm::cuda
