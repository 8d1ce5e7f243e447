// A communicator for host and GPU memory. It wraps a host communicator, which carries out operations on host memory and
// lets ranks agree on operations on GPU memory. The latter use NCCL and fold kernels or, if a rank has no NCCL, staging
// through host memory. One thread at a time.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/api/request.h"

#include <memory>
#include <utility>
#include <vector>

namespace cohort::comm {

class DeviceCommunicator {
 public:
  explicit DeviceCommunicator(std::shared_ptr<CommunicatorImpl> host) noexcept : host_(std::move(host)) {}
  ~DeviceCommunicator();
  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;

  /// The host communicator, for functions that do not concern devices.
  CommunicatorImpl& host() const noexcept { return *host_; }

  /// These functions behave like those of CommunicatorImpl.
  Work start(const DeviceRequest& request) {
    if (!gpu_ && request.device.type == DeviceType::CPU) return host_->start(request);
    return start_beside_gpu(request);
  }
  Work start_group(std::vector<DeviceRequest> requests);
  int join(const BarrierOptions& options);
  /// Allocates memory of the host, or of a GPU. Throws Unavailable, InvalidArgument.
  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, Device device);

 private:
  class Gpu;
  Work start_beside_gpu(const DeviceRequest& request);
  const std::shared_ptr<Gpu>& gpu();

  std::shared_ptr<CommunicatorImpl> host_;
  std::shared_ptr<Gpu> gpu_;  // made at the first operation of GPU memory
};

}  // namespace cohort::comm
