// Has operations run in order, small ones by the caller at once, others from a queue by
// whoever waits for them or by a progress thread, which is started when it is first needed.
// Lock order: the core's mutex, then the mesh's. Operations run without the core's mutex; `running_` and `pending_`
// make it one at a time.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/local/channels.h"
#include "comm/local/engine.h"
#include "comm/local/fork_guard.h"
#include "comm/local/meet.h"
#include "comm/local/world.h"
#include "comm/times.h"
#include "comm/work_state.h"

#include <cohort/observer.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cohort::comm::local {

class Core;

/// An operation in the queue, or several of a group.
class QueuedWork final : public WorkState {
 public:
  using Clock = std::chrono::steady_clock;

  QueuedWork(std::shared_ptr<Core> core, std::vector<Request> requests, Clock::time_point called, bool announced)
      : requests_(std::move(requests)), called_(called), announced_(announced), core_(std::move(core)) {}

  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override;
  bool at_home() const noexcept override;

 private:
  friend class Core;
  Clock::time_point deadline() const noexcept { return called_ + requests_.front().timeout; }

  bool is_quick() const noexcept { return requests_.size() == 1 && Engine::is_quick(requests_.front()); }

  const std::vector<Request> requests_;
  const Clock::time_point called_;
  bool announced_;  // the first request has been announced already
  const std::shared_ptr<Core> core_;
  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;                  // written before done_
  std::vector<std::function<void()>> callbacks_;  // under the core's mutex
};

/// What the communicator, its Works and its progress thread share.
class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const FormOptions& options, std::unique_ptr<MeetingPoint> point)
      : world_(options, std::move(point)),
        engine_(world_, options),
        timed_(times::wanted() && !options.naming),  // else the larger world's operations are measured
        channels_({world_, *guard_, observer_, [this] { return shared_from_this(); }}) {}

  Work submit(const Request& request);
  Work submit_group(std::vector<Request> requests);
  int join(std::chrono::milliseconds patience);
  void wait_for(QueuedWork& work);
  bool wait_for(QueuedWork& work, std::chrono::nanoseconds limit);
  void add_callback(QueuedWork& work, std::function<void()> callback);
  /// Ends the progress threads once nothing is under way.
  void stop();

  World& world() noexcept { return world_; }
  Engine& engine() noexcept { return engine_; }
  bool in_child() const noexcept { return guard_->in_child(); }
  const std::shared_ptr<ForkGuard>& guard() const noexcept { return guard_; }
  void set_observer(Observer* observer) noexcept { observer_.store(observer, std::memory_order_release); }

 private:
  using Clock = std::chrono::steady_clock;

  Work enqueue(std::vector<Request> requests, Clock::time_point called, bool announced);
  void run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit = Clock::time_point::max());
  bool run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error) noexcept;
  std::optional<Error> run_group(QueuedWork& work) noexcept;
  void run_fused(std::span<const Request> requests, CollectiveEvent* event);
  template <class Body>
  std::optional<Error> guarded(const Request& request, Clock::time_point called, Body body) noexcept;
  void limit_waiting();
  void progress();

  const std::shared_ptr<ForkGuard> guard_ = std::make_shared<ForkGuard>();
  World world_;
  Engine engine_;
  std::atomic<Observer*> observer_{nullptr};
  const bool timed_;
  Channels channels_;
  std::atomic<int> pending_{0};  // in the queue or running from it; 0: the caller may run one itself

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::condition_variable work_done_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;  // the front one may be running
  bool running_ = false;                           // an operation of the queue, or its callbacks
  std::thread::id runner_;                         // of an operation of the queue
  bool dozing_ = false;                            // the progress thread looks by itself before long
  Clock::time_point enqueued_{};
  bool stopping_ = false;
  std::thread progress_;
  std::shared_ptr<sys::Mapping> fusing_;  // registered memory in which small buffers travel together
};

// Runs `body(event)` and tells the observer. What goes wrong is returned.
template <class Body>
std::optional<Error> Core::guarded(const Request& request, Clock::time_point called, Body body) noexcept {
  Observer* const observer = observer_.load(std::memory_order_acquire);
  const bool measured = observer != nullptr || timed_;
  CollectiveEvent event;
  if (measured) event.begun = Clock::now();
  std::optional<Error> failed;
  bool finished = true;
  try {
    finished = body(measured ? &event : nullptr);
  } catch (const Error& error) {
    failed = error;
  } catch (const std::exception& error) {
    failed = Error(ErrorCode::Internal, std::string("unexpected in a collective -- ") + error.what());
    engine_.abort(error.what());
  }
  if (measured && finished) {
    event.operation = name_of(request.kind);
    event.bytes = request.payload();
    event.called = called == Clock::time_point{} ? event.begun : called;
    event.ended = Clock::now();
    event.failed = failed.has_value();
    if (timed_) times::add(event);
    if (observer != nullptr) observer->on_collective(event);
  }
  return failed;
}

}  // namespace cohort::comm::local
