// The operations of a communicator, in order. A thread that waits for an operation runs those in front of it and the
// operation itself; if no thread waits, a thread of the communicator runs them. Each plane derives a Queue that says
// how an operation is carried out and where the communicator's thread sleeps. Operations run without the mutex, one at
// a time (`running_`). Operations on device memory are queued as Composites.
#pragma once

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
class QueuedWork;

/// Lets a composite operation work with the other ranks in its turn. Its functions throw Mismatch, or the error that
/// has ended the world. Belongs to the thread that runs the operation.
class Turn {
 public:
  using Clock = Carrier::Clock;

  Turn(Queue& queue, QueuedWork& work, Clock::time_point limit) noexcept : queue_(queue), work_(work), limit_(limit) {}
  /// Lets the ranks agree on an operation (Request::round), but does not carry it out. Returns false if not all ranks
  /// have come within the turn's time: then `Composite::run` returns unfinished, and is called again.
  bool agree(const Request& whole, Round& round, CollectiveEvent* event);
  /// Carries out an operation on host memory, as a part of the composite one. Adds the costs to `event`, if not null.
  void carry_out(const Request& part, CollectiveEvent* event);
  /// Returns how many of the requests, from the first on, are carried out in one buffer; at least 1.
  static std::size_t count_together(std::span<const Request> requests) noexcept;
  /// Carries out requests that `count_together` has counted.
  void carry_out(std::span<const Request> together, CollectiveEvent* event);
  /// Gathers `bytes` bytes of every rank, by rank.
  void exchange(const void* own, void* all, std::size_t bytes);
  /// Checks on the other ranks, and drives their messages: to be called repeatedly while the operation waits.
  void attend();
  /// Deadline of the operation; may become earlier, since the operations queued behind this one have deadlines as well.
  Clock::time_point deadline() const noexcept;

 private:
  Queue& queue_;
  QueuedWork& work_;
  const Clock::time_point limit_;
};

/// An operation that consists of several operations on host memory and of work between them.
class Composite {
 public:
  virtual ~Composite() = default;
  /// Runs the operation in its turn. Sets `finished` to false if ranks have not come: then `run` is called again.
  virtual std::optional<Error> run(Turn& turn, bool& finished) noexcept = 0;
  /// True if the operation takes little time after all ranks have come.
  virtual bool is_quick() const noexcept = 0;
};

/// An operation in the queue, or all operations of a group.
class QueuedWork final : public PendingWork {
 public:
  QueuedWork(std::shared_ptr<Queue> queue, std::vector<Request> requests, Clock::time_point called, bool announced);

 private:
  friend class Queue;
  friend class Turn;
  Clock::time_point deadline() const noexcept { return called_ + requests_.front().timeout; }

  const std::vector<Request> requests_;
  const Clock::time_point called_;
  bool announced_;                        // true if the first request has been announced already
  std::shared_ptr<Composite> composite_;  // set until it has run; the request then only names the operation in messages
};

class Queue : public Carrier, public std::enable_shared_from_this<Queue> {
 public:
  /// Starts a checked request whose timeout is set.
  virtual Work submit(const Request& request) = 0;
  /// Starts the checked requests of a group, whose timeouts are set.
  Work submit_group(std::vector<Request> requests);
  /// Starts a composite operation. `whole` has its name and timeout. `now`: the communicator's thread is to run the
  /// operation, even if no thread waits for it yet.
  Work submit(std::shared_ptr<Composite> composite, const Request& whole, bool now);
  int join(std::chrono::milliseconds patience);
  /// Ends the world. Any thread.
  virtual void abort(std::string_view reason) = 0;
  /// Ends the threads after the operations under way.
  virtual void stop();
  /// Returns the error that has ended the world, as far as this rank knows, for an operation described by `doing`;
  /// nullopt if the world has not ended. Any thread.
  std::optional<Error> why_ended(std::string_view doing) {
    return ended() ? std::optional(recorded(std::string(doing))) : std::nullopt;
  }
  void set_observer(Observer* observer) noexcept { observer_.store(observer, std::memory_order_release); }

  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(mutex_, std::move(callback));
  }

  // The next functions are for work that a composite operation begins in its turn and that ends after it.
  // Runs `body(event)`. Reports the operation to the observer if it is over, because `body` returned true or threw.
  // Returns the error that `body` threw.
  template <class Body>
  std::optional<Error> guarded(const Request& request, Clock::time_point called, Body body) noexcept;
  /// Reports to the observer an operation that ends now.
  void tell(CollectiveEvent& event, const Request& request, Clock::time_point called, bool failed) noexcept;
  /// Makes callers queue all operations instead of running some themselves, until every `keep_from_caller` has had its
  /// `release_caller`. Called in a turn.
  void keep_from_caller();
  void release_caller();
  /// Checks on the other ranks. Does nothing if callers may run an operation, or if one is running, since a running
  /// operation checks by itself. Throws the error that has ended the world.
  void attend_if_idle();
  /// True if the world has ended, as far as this rank knows. Any thread.
  virtual bool ended() noexcept = 0;
  /// Reports to the ranks of this host how many of the operations that end after their turn are over.
  virtual void tell_over(std::uint64_t number) noexcept = 0;
  /// True if `number` such operations are over on all other ranks of this host, except lost ones, or if the world has
  /// ended.
  virtual bool are_over(std::uint64_t number) const noexcept = 0;
  /// Keeps the queue's thread alive until every `keep` has had its `unkeep`.
  void keep();
  void unkeep();
  /// True if the queue is to stop and no operation is left.
  bool is_leaving();
  /// Calls `body`, a callback of an operation that has ended. It may destroy the communicator's last handle.
  void call_back(const std::function<void()>& body);
  /// True if the calling thread is in a callback of an operation.
  bool is_in_callback();

 protected:
  /// `timed`: operations are counted for COHORT_TIMES.
  explicit Queue(bool timed) noexcept : timed_(timed) {}

  // Planes implement the next functions.
  /// Runs an operation. Returns false if ranks have not come by `limit`: then the operation has been announced, and
  /// `run_one` is called again.
  virtual bool run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
                       CollectiveEvent* event) = 0;
  virtual int run_join(std::chrono::milliseconds patience) = 0;
  /// Memory of kFusedTotal bytes in which small buffers are carried out together.
  virtual std::byte* fusing() = 0;
  /// True if the operation may run in a caller that waits with a deadline.
  virtual bool is_quick(const Request&) const noexcept { return false; }
  /// Number of ranks in the world.
  virtual int ranks() const noexcept = 0;
  /// True if the thread has to be woken for an operation. Called under the mutex, before the operation is queued.
  virtual bool wants_rousing() = 0;
  /// Wakes the thread, if it sleeps, since there is something to do.
  virtual void rouse() noexcept = 0;
  /// Makes the thread run an operation that no waiting thread runs. Called under the mutex.
  virtual void leave_to_thread() noexcept = 0;
  /// True if the plane returns borrowed buffers to callers that ask for them (Request::borrowed).
  virtual bool lends() const noexcept { return false; }
  /// Implements Turn::attend.
  virtual void attend() = 0;
  /// The error with which an operation fails because the world has ended.
  virtual Error recorded(const std::string& doing) const = 0;

  // Planes use the next functions.
  Work enqueue(std::shared_ptr<QueuedWork> work, bool now = false);
  Work enqueue(const Request& request, Clock::time_point called, bool announced);
  /// Runs the first operation in the queue. The lock is held on entry and on return, but not during the operation. If
  /// ranks have not come by `limit`, the operation stays in the queue for the next thread that calls this.
  void run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit = Clock::time_point::max());
  /// Time of the call that started the first operation in the queue.
  Clock::time_point front_called() const noexcept { return queue_.front()->called_; }
  /// True if no operation is left and no more can come. Called under the mutex.
  bool is_finished() const noexcept { return stopping_ && queue_.empty() && keepers_ == 0; }

  Waiters waiters_;
  std::atomic<Observer*> observer_{nullptr};
  const bool timed_;
  std::atomic<int> pending_{0};  // operations queued or running, and reasons to queue; 0: callers may run their own

  std::mutex mutex_;
  std::condition_variable work_to_do_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;  // the first work may be running
  bool running_ = false;                           // an operation of the queue runs, or its callbacks run
  bool stopping_ = false;
  Clock::time_point active_{};  // when an operation last began or ended
  std::thread thread_;

 private:
  friend class Turn;
  bool run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error) noexcept;
  std::optional<Error> run_group(QueuedWork& work) noexcept;
  bool may_be_quick(const QueuedWork& work) const noexcept;
  void set_limit() noexcept;

  std::condition_variable work_done_;
  std::thread::id runner_;  // thread that runs an operation of the queue
  std::thread::id caller_back_;
  int kept_from_caller_ = 0;
  int keepers_ = 0;
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

/// Limit of the buffer in which small adjacent operations of a group are carried out together.
inline constexpr std::size_t kFusedTotal = std::size_t{1} << 20;

}  // namespace cohort::comm
