// The operations of a communicator, in order: whoever waits for one runs what is in front of it, else a thread of the
// communicator does. A plane derives from it, and says how one operation is carried out and where its thread sleeps.
// Operations run without the mutex; `running_` makes it one at a time. What a GPU has been given is in flight, and ends
// beside those that come after it: queue_device.cpp.
#pragma once

#include "comm/api/device_op.h"
#include "comm/api/request.h"
#include "comm/api/work_state.h"
#include "comm/engine/pending_work.h"

#include <cohort/observer.h>
#include <cohort/work.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace cohort::comm {

class Queue;

/// An operation in the queue, or several of a group.
class QueuedWork final : public PendingWork {
 public:
  QueuedWork(std::shared_ptr<Queue> queue, std::vector<Request> requests, Clock::time_point called, bool announced);
  Ordering order(const Device& stream, Clock::time_point limit) override;
  bool is_given_in(const Device& stream) const noexcept override;

 private:
  friend class Queue;
  Clock::time_point deadline() const noexcept { return called_ + requests_.front().timeout; }

  Queue& queue_;
  const std::vector<Request> requests_;
  const Clock::time_point called_;
  bool announced_;                                      // the first request has been announced already
  std::shared_ptr<DeviceOp::InFlight> in_flight_ = {};  // under the queue's mutex; null: it is not
  std::optional<CollectiveEvent> event_ = {};           // what is to be told when it ends
};

class Queue : public Carrier, public std::enable_shared_from_this<Queue> {
 public:
  /// Starts a checked request, or those of a group, whose timeouts are set.
  virtual Work submit(const Request& request) = 0;
  Work submit_group(std::vector<Request> requests);
  int join(std::chrono::milliseconds patience);
  /// Any thread.
  virtual void abort(std::string_view reason) = 0;
  /// Ends the threads once nothing is under way.
  virtual void stop();
  /// What has ended the world, as far as this rank can know by now, for an operation of this name; nullopt: it goes on.
  /// Any thread.
  std::optional<Error> why_ended(std::string_view doing) {
    return ended() ? std::optional(recorded(std::string(doing))) : std::nullopt;
  }
  void set_observer(Observer* observer) noexcept { observer_.store(observer, std::memory_order_release); }

  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  /// The same until it is in flight or done.
  bool wait_until_given(QueuedWork& work, Clock::time_point limit);
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(mutex_, std::move(callback));
  }

 protected:
  /// `timed`: operations count for COHORT_TIMES.
  explicit Queue(bool timed) noexcept : timed_(timed) {}

  // What a plane does:
  /// Runs an operation. False if ranks have not come by `limit`: then it has been announced, and is run again.
  virtual bool run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
                       CollectiveEvent* event) = 0;
  virtual int run_join(std::chrono::milliseconds patience) = 0;
  /// Memory of kFusedTotal bytes in which small buffers travel together.
  virtual std::byte* fusing() = 0;
  /// May run in a caller that waits with a deadline.
  virtual bool is_quick(const Request&) const noexcept { return false; }
  /// In the world.
  virtual int ranks() const noexcept = 0;
  /// Under the mutex, before an operation is queued: whether the thread has to be roused for it.
  virtual bool wants_rousing() = 0;
  /// The thread may sleep, and there is something to do.
  virtual void rouse() noexcept = 0;
  /// Under the mutex: an operation is left to the thread, whose waiter has a deadline.
  virtual void leave_to_thread() noexcept = 0;
  /// Whether it leaves what only moves where it is for who asks for that (Request::borrowed).
  virtual bool lends() const noexcept { return false; }
  /// As DeviceOp::Ranks::attend.
  virtual void attend() = 0;
  /// The world has, as far as this rank can know by now. Any thread.
  virtual bool ended() noexcept = 0;
  /// Why, for an operation that is told.
  virtual Error recorded(const std::string& doing) const = 0;
  /// Tells the ranks of this host that so many of the operations that a GPU was given are over.
  virtual void tell_over(std::uint64_t number) noexcept = 0;
  /// Whether they are over on the other ranks of this host, or these have gone, or the world has ended.
  virtual bool are_over(std::uint64_t number) const noexcept = 0;

  // What it may use:
  Work enqueue(std::vector<Request> requests, Clock::time_point called, bool announced);
  /// Runs the first operation in the queue. The lock is held on entry and on return, not while it runs. If ranks have
  /// not come by `limit`, the operation stays in the queue for whoever takes it on next.
  void run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit = Clock::time_point::max());
  /// When the first operation in the queue was asked for.
  Clock::time_point front_called() const noexcept { return queue_.front()->called_; }
  /// Under the mutex: nothing is left to do, and nothing comes.
  bool is_finished() const noexcept { return stopping_ && queue_.empty() && !watching_; }
  /// Runs `body(event)` and tells the observer. What goes wrong is returned.
  template <class Body>
  std::optional<Error> guarded(const Request& request, Clock::time_point called, Body body) noexcept;

  Waiters waiters_;
  std::atomic<Observer*> observer_{nullptr};
  const bool timed_;
  std::atomic<int> pending_{0};  // in the queue or running from it; 0: the caller may run one itself

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;  // the front one may be running
  bool running_ = false;                           // an operation of the queue, or its callbacks
  bool stopping_ = false;
  Clock::time_point active_{};  // when something was last begun or ended
  std::thread thread_;

 private:
  friend class QueuedWork;
  class PeerPoller;
  class PlaneOfPieces;
  using InFlight = std::shared_ptr<DeviceOp::InFlight>;
  bool run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error, InFlight& given) noexcept;
  /// Takes staged requests a step further. What goes wrong there ends the world: the others wait for this rank.
  template <class Way>
  void step(std::span<const Request> requests, const Way& way);
  std::optional<Error> run_single(const Request& request, QueuedWork& work, Clock::time_point limit,
                                  bool& finished) noexcept;
  /// One that goes in pieces. Throws what `run_one` throws; what goes wrong once the ranks have agreed ends the world.
  void run_pieces(const Request& request, const QueuedWork& work, CollectiveEvent* event);
  std::optional<Error> run_group(std::span<const Request> requests, const QueuedWork& work) noexcept;
  std::optional<Error> run_direct(QueuedWork& work, Clock::time_point limit, bool& finished, InFlight& given) noexcept;
  bool may_be_quick(const QueuedWork& work) const noexcept;
  void set_limit() noexcept;
  void tell(CollectiveEvent& event, const Request& request, Clock::time_point called, bool failed) noexcept;
  template <class Ready>
  bool await(const QueuedWork& work, const Ready& ready, Clock::time_point limit);

  // In flight:
  /// The GPU has the next when one is over: the host runs no further ahead.
  static constexpr std::size_t kMostInFlight = 64;
  void put_in_flight(const std::shared_ptr<QueuedWork>& work, InFlight given) noexcept;
  /// Ends what is over, in order. False: nothing was, or another thread looks.
  bool look_in_flight() noexcept;
  void end_in_flight(const std::shared_ptr<QueuedWork>& work, std::optional<Error> failed) noexcept;
  void fail_in_flight(const Error& error) noexcept;
  /// By whoever runs `work`: until less than `most` operations are in flight. Throws what ends the world, Timeout.
  void await_room(std::size_t most, const QueuedWork& work);
  void watch_from_now_on();
  void watch() noexcept;
  bool look_after_others() noexcept;

  std::condition_variable work_done_;
  std::thread::id runner_;  // of an operation of the queue
  std::mutex looking_;      // at what is in flight; before mutex_
  std::thread::id looker_;
  std::deque<std::shared_ptr<QueuedWork>> in_flight_;
  std::uint64_t over_ = 0;  // that were in flight
  Clock::time_point last_deadline_{};
  std::condition_variable to_watch_;
  bool watching_ = false;
  std::thread watcher_;
};

template <class Body>
std::optional<Error> Queue::guarded(const Request& request, Clock::time_point called, Body body) noexcept {
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
    abort(error.what());
  }
  if (measured && finished) tell(event, request, called, failed.has_value());
  return failed;
}

/// Neighbours in a group of operations that are small and alike travel as one, in one buffer.
/// No more than this does.
inline constexpr std::size_t kFusedTotal = std::size_t{1} << 20;

}  // namespace cohort::comm
