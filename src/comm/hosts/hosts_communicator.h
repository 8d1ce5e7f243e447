// The backend of ranks on several hosts. One thread at a time; `abort` from any.
#pragma once

#include "comm/control/queue_communicator.h"
#include "comm/hosts/core.h"

#include <memory>
#include <span>
#include <vector>

namespace cohort::comm::hosts {

class HostsCommunicator final : public QueueCommunicator {
 public:
  /// `place`: of a group, whose members have told each other where they are; else the store tells.
  explicit HostsCommunicator(const FormOptions& options, std::unique_ptr<Place> place = nullptr);

  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) override;

 private:
  Core& core() const noexcept { return static_cast<Core&>(*queue_); }
  std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                               std::chrono::milliseconds timeout, bool background) override;
};

}  // namespace cohort::comm::hosts
