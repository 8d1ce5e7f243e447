// A communicator over shared memory: puts operations in a queue and has them run in order, by the caller where it would
// wait anyway, else by a progress thread, which is started when it is first needed.
// Lock order: the core's mutex, then the mesh's. Operations run without the core's mutex; `running_` makes it one at a
// time.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/local/engine.h"
#include "comm/local/fork_guard.h"
#include "comm/local/operation.h"
#include "comm/work_state.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cohort::comm::local {

class Core;

/// An operation in the queue.
class QueuedWork final : public WorkState {
 public:
  QueuedWork(std::shared_ptr<Core> core, const Operation& operation) : operation_(operation), core_(std::move(core)) {}

  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override;
  bool at_home() const noexcept override;

 private:
  friend class Core;
  const Operation operation_;
  const std::shared_ptr<Core> core_;
  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;                  // written before done_
  std::vector<std::function<void()>> callbacks_;  // under the core's mutex
};

/// What the communicator, its Works and its progress thread share.
class Core : public std::enable_shared_from_this<Core> {
 public:
  explicit Core(const FormOptions& options) : engine_(options) {}

  Work submit(Operation operation);
  int join(std::chrono::milliseconds patience);
  void wait_for(QueuedWork& work);
  bool wait_for(QueuedWork& work, std::chrono::nanoseconds limit);
  void add_callback(QueuedWork& work, std::function<void()> callback);
  /// Ends the progress thread once the queue is empty.
  void stop();

  Engine& engine() noexcept { return engine_; }
  bool in_child() const noexcept { return guard_->in_child(); }
  const std::shared_ptr<ForkGuard>& guard() const noexcept { return guard_; }
  void set_observer(Observer* observer) noexcept { observer_.store(observer, std::memory_order_release); }

 private:
  void run_front(std::unique_lock<std::mutex>& lock);
  std::optional<Error> run(const Operation& operation) noexcept;
  void limit_waiting();
  void progress();

  const std::shared_ptr<ForkGuard> guard_ = std::make_shared<ForkGuard>();
  Engine engine_;
  std::atomic<Observer*> observer_{nullptr};

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::condition_variable work_done_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;  // the front one may be running
  bool running_ = false;                           // an operation, or its callbacks
  std::thread::id runner_;                         // of an operation of the queue
  bool stopping_ = false;
  std::thread progress_;
};

class LocalCommunicator final : public CommunicatorImpl {
 public:
  explicit LocalCommunicator(const FormOptions& options);
  ~LocalCommunicator() override;

  const cluster::Placement& placement() const noexcept override { return placement_; }
  std::chrono::milliseconds timeout() const noexcept override { return timeout_; }

  Work all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options) override;
  Work reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options) override;
  Work all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options) override;
  Work broadcast(Buffer data, const BroadcastOptions& options) override;
  Work barrier(const BarrierOptions& options) override;
  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, Device device) override;
  int join(const BarrierOptions& options) override;
  void abort(std::string_view reason) override;
  void set_observer(Observer* observer) noexcept override { core_->set_observer(observer); }

 private:
  void check_home() const;
  Operation operation(Kind kind, ConstBuffer input, Buffer output,
                      std::optional<std::chrono::milliseconds> timeout) const;

  const cluster::Placement placement_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Core> core_;
};

}  // namespace cohort::comm::local
