// A Communicator over a queue: checks that it is used in the process that formed it, and hands operations on. Planes
// derive from it, to form groups and to make memory. One thread at a time; `abort` from any.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/control/queue.h"
#include "comm/cuda/nccl_plane.h"
#include "comm/cuda/staging.h"

#include <memory>
#include <span>
#include <vector>

namespace cohort::comm {

class QueueCommunicator : public CommunicatorImpl {
 public:
  ~QueueCommunicator() override;

  const cluster::Placement& placement() const noexcept override { return placement_; }
  std::chrono::milliseconds timeout() const noexcept override { return timeout_; }

  Work start(const Request& request) override;
  Work start_group(std::vector<Request> requests) override;
  int join(const BarrierOptions& options) override;
  std::shared_ptr<CommunicatorImpl> split(const SplitOptions& options) override;
  std::shared_ptr<CommunicatorImpl> group(std::span<const int> ranks, const GroupOptions& options) override;
  void abort(std::string_view reason) override;
  void set_observer(Observer* observer) noexcept override { queue_->set_observer(observer); }

 protected:
  /// `hosts`: by rank; empty: all are on one.
  QueueCommunicator(cluster::Placement placement, std::chrono::milliseconds timeout, std::shared_ptr<Queue> queue,
                    std::vector<int> hosts = {});

  void check_home() const;
  /// With its timeout.
  Request timed(Request request) const;
  /// A GPU's: for NCCL, if all may go that way, else with host memory in place of the GPU's.
  void prepare_for_gpus(std::span<Request> requests);
  /// Forms the group of those who bring this color; null where it is kNoColor. `listed`: its ranks, where they were
  /// given as a list.
  virtual std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                                       std::chrono::milliseconds timeout, bool background) = 0;

  const cluster::Placement placement_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Queue> queue_;

 private:
  const GpuSums gpu_sums_;
  const std::shared_ptr<cuda::NcclPlane> nccl_;
  const std::shared_ptr<cuda::Rooms> rooms_ = std::make_shared<cuda::Rooms>();
};

}  // namespace cohort::comm
