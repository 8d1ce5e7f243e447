// Has the operations of a world on several hosts run in order: by whoever waits for them, else by a thread of the
// communicator, which also drives the transport while nobody waits. Lock order: the core's mutex, then the transport's.
#pragma once

#include "comm/hosts/engine.h"
#include "comm/hosts/post.h"
#include "comm/hosts/world.h"
#include "comm/local/fork_guard.h"
#include "comm/work_state.h"

#include <cohort/observer.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cohort::comm::hosts {

class Core;

/// An operation in the queue, or several of a group.
class QueuedWork final : public WorkState {
 public:
  using Clock = std::chrono::steady_clock;
  QueuedWork(std::shared_ptr<Core> core, std::vector<Request> requests, Clock::time_point called)
      : requests_(std::move(requests)), called_(called), core_(std::move(core)) {}

  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override;
  bool at_home() const noexcept override;

 private:
  friend class Core;
  Clock::time_point deadline() const noexcept { return called_ + requests_.front().timeout; }

  const std::vector<Request> requests_;
  const Clock::time_point called_;
  const std::shared_ptr<Core> core_;
  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;                  // written before done_
  std::vector<std::function<void()>> callbacks_;  // under the core's mutex
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const FormOptions& options, std::unique_ptr<Place> place);
  /// To be called once it is owned by a shared_ptr.
  void begin();

  Work submit(std::vector<Request> requests);
  Work submit_message(const Request& request);
  Work receive_any(const Request& request);
  int join(std::chrono::milliseconds patience);
  void wait_for(QueuedWork& work);
  bool wait_for(QueuedWork& work, std::chrono::nanoseconds limit);
  void add_callback(QueuedWork& work, std::function<void()> callback);
  void abort(std::string_view reason);
  /// Ends the thread once nothing is under way, and leaves the world.
  void stop();

  World& world() noexcept { return world_; }
  bool in_child() const noexcept { return world_.in_child(); }
  void set_observer(Observer* observer) noexcept { observer_.store(observer, std::memory_order_release); }

 private:
  using Clock = std::chrono::steady_clock;

  void run_front(std::unique_lock<std::mutex>& lock);
  std::optional<Error> run(QueuedWork& work) noexcept;
  void run_one(const Request& request, Clock::time_point called);
  void run_fused(std::span<const Request> requests, Clock::time_point called);
  void limit_waiting();
  void serve();

  World world_;
  Engine::Audience audience_;
  std::atomic<int> drivers_{0};
  std::atomic<bool> here_first_{true};
  std::atomic<Observer*> observer_{nullptr};
  Post post_;
  Engine engine_;

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::condition_variable work_done_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;  // the front one may be running
  bool running_ = false;
  std::thread::id runner_;
  Clock::time_point active_{};  // when something was last begun or ended
  bool asleep_ = false;         // the thread sleeps in the transport
  bool stopping_ = false;
  std::thread thread_;
  std::vector<std::byte> fusing_;  // in which small buffers travel together
};

}  // namespace cohort::comm::hosts
