// The operations of a communicator, in order: a thread that waits for one runs what is in front of it, else a thread of
// the communicator does. A plane derives from it, and says how one operation is carried out and where its thread
// sleeps. Operations run without the mutex; `running_` makes it one at a time. Operations on other memory than the
// host's are put into it as Composites.
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

/// Lets a composite operation work with the other ranks in its turn. Functions throw what has ended the world, and
/// Mismatch. Belongs to the thread that runs the operation.
class Turn {
 public:
  using Clock = Carrier::Clock;

  Turn(Queue& queue, QueuedWork& work, Clock::time_point limit) noexcept : queue_(queue), work_(work), limit_(limit) {}
  /// The ranks agree on an operation (Request::round), and do no more. False: not all have come within the turn's time;
  /// then `Composite::run` is not finished, and is called again.
  bool agree(const Request& whole, Round& round, CollectiveEvent* event);
  /// Carries out an operation of host memory, as a part of this one. Its costs are added to `event`, if any.
  void carry_out(const Request& part, CollectiveEvent* event);
  /// How many of these, from the first on, travel as one; at least 1. Then those.
  static std::size_t count_together(std::span<const Request> requests) noexcept;
  void carry_out(std::span<const Request> together, CollectiveEvent* event);
  /// Every rank's `bytes` bytes, by rank.
  void exchange(const void* own, void* all, std::size_t bytes);
  /// Checks on the other ranks, and drives their messages: to be called again and again while something is waited for.
  void attend();
  /// Deadline of the operation; it may come nearer, since the operations behind it have deadlines as well.
  Clock::time_point deadline() const noexcept;

 private:
  Queue& queue_;
  QueuedWork& work_;
  const Clock::time_point limit_;
};

/// An operation that consists of others, of host memory, and of what is done between them.
class Composite {
 public:
  virtual ~Composite() = default;
  /// Runs it in its turn. Not `finished`: ranks have not come, and it is run again.
  virtual std::optional<Error> run(Turn& turn, bool& finished) noexcept = 0;
  /// True if it is over soon once all ranks have come.
  virtual bool is_quick() const noexcept = 0;
};

/// An operation in the queue, or several of a group.
class QueuedWork final : public PendingWork {
 public:
  QueuedWork(std::shared_ptr<Queue> queue, std::vector<Request> requests, Clock::time_point called, bool announced);

 private:
  friend class Queue;
  friend class Turn;
  Clock::time_point deadline() const noexcept { return called_ + requests_.front().timeout; }

  const std::vector<Request> requests_;
  const Clock::time_point called_;
  bool announced_;                        // the first request has been announced already
  std::shared_ptr<Composite> composite_;  // the request is what it is called in messages; until it has run
};

class Queue : public Carrier, public std::enable_shared_from_this<Queue> {
 public:
  /// Starts a checked request, or those of a group, whose timeouts are set.
  virtual Work submit(const Request& request) = 0;
  Work submit_group(std::vector<Request> requests);
  /// `whole` has its name and timeout. `now`: it is not left to its waiter.
  Work submit(std::shared_ptr<Composite> composite, const Request& whole, bool now);
  int join(std::chrono::milliseconds patience);
  /// Any thread.
  virtual void abort(std::string_view reason) = 0;
  /// Ends the threads once nothing is under way.
  virtual void stop();
  /// The error that has ended the world, as far as this rank can know by now, for an operation of this name; nullopt:
  /// the world goes on. Any thread.
  std::optional<Error> why_ended(std::string_view doing) {
    return ended() ? std::optional(recorded(std::string(doing))) : std::nullopt;
  }
  void set_observer(Observer* observer) noexcept { observer_.store(observer, std::memory_order_release); }

  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(mutex_, std::move(callback));
  }

  // For what a composite operation has begun and what ends after its turn:
  /// Runs `body(event)` and reports to the observer if the body returns true. Errors are returned.
  template <class Body>
  std::optional<Error> guarded(const Request& request, Clock::time_point called, Body body) noexcept;
  /// Reports an operation to the observer that ends now.
  void tell(CollectiveEvent& event, const Request& request, Clock::time_point called, bool failed) noexcept;
  /// Lets nothing run in callers without the queue from now on; in a turn, until as many calls of `release_caller`.
  void keep_from_caller();
  void release_caller();
  /// Checks on the other ranks, unless an operation runs, which does, or the caller may run one. Throws what has ended
  /// the world.
  void attend_if_idle();
  /// The world has, as far as this rank can know by now. Any thread.
  virtual bool ended() noexcept = 0;
  /// Reports to the ranks of this host how many operations that end after their turn are over.
  virtual void tell_over(std::uint64_t number) noexcept = 0;
  /// True if so many are over on the other ranks of this host, or these have gone, or the world has ended.
  virtual bool are_over(std::uint64_t number) const noexcept = 0;
  /// Its thread stays until as many calls of `unkeep`.
  void keep();
  void unkeep();
  /// It is to stop, and no operation is left.
  bool is_leaving();
  /// Calls what belongs to an operation that has ended: the last handle of the communicator may go in there.
  void call_back(const std::function<void()>& body);
  /// The calling thread is in a callback of an operation.
  bool is_in_callback();

 protected:
  /// `timed`: operations count for COHORT_TIMES.
  explicit Queue(bool timed) noexcept : timed_(timed) {}

  // Implemented by a plane:
  /// Runs an operation. False if ranks have not come by `limit`: then it has been announced, and is run again.
  virtual bool run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
                       CollectiveEvent* event) = 0;
  virtual int run_join(std::chrono::milliseconds patience) = 0;
  /// Memory of kFusedTotal bytes in which small buffers travel together.
  virtual std::byte* fusing() = 0;
  /// May run in a caller that waits with a deadline.
  virtual bool is_quick(const Request&) const noexcept { return false; }
  /// Number of ranks in the world.
  virtual int ranks() const noexcept = 0;
  /// True if the thread has to be roused for an operation; called under the mutex, before it is queued.
  virtual bool wants_rousing() = 0;
  /// The thread may sleep, and there is something to do.
  virtual void rouse() noexcept = 0;
  /// Called under the mutex: an operation is left to the thread, whose waiter has a deadline.
  virtual void leave_to_thread() noexcept = 0;
  /// True if it leaves data that only moves where it is for callers that ask for that (Request::borrowed).
  virtual bool lends() const noexcept { return false; }
  /// Does as Turn::attend.
  virtual void attend() = 0;
  /// Reason why the world has ended, for an operation that fails with it.
  virtual Error recorded(const std::string& doing) const = 0;

  // Available to a plane:
  Work enqueue(std::shared_ptr<QueuedWork> work, bool now = false);
  Work enqueue(const Request& request, Clock::time_point called, bool announced);
  /// Runs the first operation in the queue. The lock is held on entry and on return, not while it runs. If ranks have
  /// not come by `limit`, the operation stays in the queue for the next thread that takes it on.
  void run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit = Clock::time_point::max());
  /// When the first operation in the queue was asked for.
  Clock::time_point front_called() const noexcept { return queue_.front()->called_; }
  /// True if nothing is left to do, and nothing comes; under the mutex.
  bool is_finished() const noexcept { return stopping_ && queue_.empty() && keepers_ == 0; }

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
  friend class Turn;
  bool run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error) noexcept;
  std::optional<Error> run_group(QueuedWork& work) noexcept;
  bool may_be_quick(const QueuedWork& work) const noexcept;
  void set_limit() noexcept;

  std::condition_variable work_done_;
  std::thread::id runner_;  // of an operation of the queue
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

/// Neighbours in a group of operations that are small and alike travel as one, in one buffer: no more than this.
inline constexpr std::size_t kFusedTotal = std::size_t{1} << 20;

}  // namespace cohort::comm
