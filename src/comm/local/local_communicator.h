// The backend of ranks on one host: a Communicator over shared memory. Checks that it is used in the process that
// formed it, and hands operations to its Core. One thread at a time; `abort` from any.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/local/core.h"
#include "comm/local/meet.h"

#include <memory>
#include <span>
#include <vector>

namespace cohort::comm::local {

class LocalCommunicator final : public CommunicatorImpl {
 public:
  /// `point`: of a group, whose members have told each other where they are; else the store tells.
  explicit LocalCommunicator(const FormOptions& options, std::unique_ptr<MeetingPoint> point = nullptr);
  ~LocalCommunicator() override;

  const cluster::Placement& placement() const noexcept override { return placement_; }
  std::chrono::milliseconds timeout() const noexcept override { return timeout_; }

  Work start(const Request& request) override;
  Work start_group(std::vector<Request> requests) override;
  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, Device device) override;
  int join(const BarrierOptions& options) override;
  std::shared_ptr<CommunicatorImpl> split(const SplitOptions& options) override;
  std::shared_ptr<CommunicatorImpl> group(std::span<const int> ranks, const GroupOptions& options) override;
  void abort(std::string_view reason) override;
  void set_observer(Observer* observer) noexcept override { core_->set_observer(observer); }
  /// For a larger world that this one is part of.
  const std::shared_ptr<Core>& core() const noexcept { return core_; }

 private:
  void check_home() const;
  std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                               std::chrono::milliseconds timeout);

  const cluster::Placement placement_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Core> core_;
};

}  // namespace cohort::comm::local
