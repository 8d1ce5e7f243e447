// The backend of ranks on one host: a Communicator over shared memory. One thread at a time; `abort` from any.
#pragma once

#include "comm/control/queue_communicator.h"
#include "comm/local/core.h"
#include "comm/local/rendezvous.h"

#include <memory>
#include <span>
#include <vector>

namespace cohort::comm::local {

class LocalCommunicator final : public QueueCommunicator {
 public:
  /// `point`: of a group, whose members have told each other where they are; else the store tells.
  explicit LocalCommunicator(const FormOptions& options, std::unique_ptr<Rendezvous> point = nullptr);

  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) override;
  /// For a larger world that this one is part of.
  Core& core() const noexcept { return static_cast<Core&>(*queue_); }

 private:
  std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                               std::chrono::milliseconds timeout, bool background) override;
};

}  // namespace cohort::comm::local
