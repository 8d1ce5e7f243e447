// A communicator of whatever memory: it wraps one of the host's, which carries out what is of the host's memory and by
// which ranks agree on the rest. Memory of a GPU goes by NCCL and by kernels that fold, or, where a rank has no NCCL,
// by staging through the host's memory. One thread at a time.
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

  /// For what has nothing to do with devices.
  CommunicatorImpl& host() const noexcept { return *host_; }

  /// Functions as those of CommunicatorImpl.
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
  std::shared_ptr<Gpu> gpu_;  // from the first operation of a GPU's memory on
};

}  // namespace cohort::comm
