#include "comm/local/core.h"

#include "base/log.h"
#include "base/result.h"
#include "sys/thread.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace cohort::comm::local {
namespace {

/// Counts the caller among those who wait for results.
class Attending {
 public:
  explicit Attending(Engine& engine) : engine_(engine), of_program_(sys::in_service_thread() ? 0 : 1) {
    engine_.attended().fetch_add(1, std::memory_order_relaxed);
    engine_.awaited().fetch_add(of_program_, std::memory_order_relaxed);
  }
  ~Attending() {
    engine_.attended().fetch_sub(1, std::memory_order_relaxed);
    engine_.awaited().fetch_sub(of_program_, std::memory_order_relaxed);
  }
  Attending(const Attending&) = delete;
  Attending& operator=(const Attending&) = delete;

 private:
  Engine& engine_;
  const int of_program_;
};

// How long the caller of a small operation waits for peers that are late before it goes on and leaves the rest to
// others.
constexpr auto kPatience = std::chrono::microseconds(100);

// Who starts an operation mostly waits for it next, and then runs it itself; waking the progress thread for it would
// cost tens of microseconds on virtual machines, and a core. So for a while after an operation that thread looks by
// itself, this often, whether one has been left to it; only one that others are queued behind wakes it.
constexpr auto kDoze = std::chrono::milliseconds(1);
constexpr auto kDozeInCrowd = std::chrono::milliseconds(4);
constexpr auto kAwake = std::chrono::milliseconds(20);

// Who waits for less does not run operations meanwhile.
constexpr auto kWorthRunning = std::chrono::milliseconds(1);

}  // namespace

// --- QueuedWork ---

void QueuedWork::wait() { core_->wait_for(*this); }
bool QueuedWork::wait_for(std::chrono::nanoseconds limit) { return core_->wait_for(*this, limit); }
void QueuedWork::on_done(std::function<void()> callback) { core_->add_callback(*this, std::move(callback)); }
bool QueuedWork::at_home() const noexcept { return !core_->in_child(); }

// --- Core ---

Work Core::submit(const Request& request) {
  if (request.kind == Kind::Send || request.kind == Kind::Recv) return channels_.submit(request);
  if (pending_.load(std::memory_order_acquire) != 0 || !Engine::is_quick(request)) {
    return enqueue({request}, Clock::now(), false);
  }
  std::atomic<bool>& in_caller = engine_.in_caller();
  if (in_caller.load(std::memory_order_relaxed)) {
    raise(ErrorCode::InvalidArgument,
          "{}: two threads call one communicator at the same time -- give each thread one of its own (split)",
          name_of(request.kind));
  }
  in_caller.store(true, std::memory_order_relaxed);
  engine_.limit_waiting(Clock::time_point::max());
  engine_.called_at({}, request.timeout);
  bool late = false;
  std::optional<times::Exposed> exposed;
  if (timed_) exposed.emplace();
  std::optional<Error> failed = guarded(request, {}, [&](CollectiveEvent* event) {
    engine_.announce(request);
    late = !engine_.await_peers(kPatience);
    if (!late) engine_.complete(request, event);
    return !late;
  });
  in_caller.store(false, std::memory_order_relaxed);
  exposed.reset();
  if (failed) return Work(std::make_shared<FailedWork>(*std::move(failed)));
  return late ? enqueue({request}, Clock::now() - kPatience, true) : Work();
}

Work Core::submit_group(std::vector<Request> requests) {
  if (requests.empty()) return {};
  if (requests.size() == 1) return submit(requests.front());
  return enqueue(std::move(requests), Clock::now(), false);
}

Work Core::enqueue(std::vector<Request> requests, Clock::time_point called, bool announced) {
  auto work = std::make_shared<QueuedWork>(shared_from_this(), std::move(requests), called, announced);
  bool rouse = true;
  {
    const std::lock_guard lock(mutex_);
    rouse = !dozing_ || running_ || !queue_.empty();
    pending_.fetch_add(1, std::memory_order_relaxed);
    queue_.push_back(work);
    limit_waiting();
    enqueued_ = Clock::now();
    if (!progress_.joinable()) {
      try {
        progress_ = sys::start_without_signals([self = shared_from_this()] { self->progress(); });
      } catch (const std::system_error& error) {  // then operations run when they are waited for
        log::warn("comm", "no progress thread, operations run when they are waited for -- {}", error.what());
      }
    }
  }
  if (rouse) work_to_do_.notify_one();
  return Work(std::move(work));
}

int Core::join(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const Attending attending(engine_);
  while (running_ || !queue_.empty()) {
    if (running_) {
      work_done_.wait(lock);
    } else {
      run_front(lock);
    }
  }
  running_ = true;
  pending_.fetch_add(1, std::memory_order_relaxed);
  engine_.limit_waiting(Clock::time_point::max());
  lock.unlock();
  const auto finish = [&] {
    lock.lock();
    running_ = false;
    pending_.fetch_sub(1, std::memory_order_release);
  };
  try {
    const int last = engine_.join(patience);
    finish();
    return last;
  } catch (...) {
    finish();
    throw;
  }
}

void Core::wait_for(QueuedWork& work) {
  if (work.done()) return;
  std::unique_lock lock(mutex_);
  const Attending attending(engine_);
  while (!work.done()) {
    if (!running_ && !queue_.empty()) {
      run_front(lock);
    } else {
      work_done_.wait(lock);
    }
  }
}

bool Core::wait_for(QueuedWork& work, std::chrono::nanoseconds limit) {
  if (work.done()) return true;
  const auto until = Clock::now() + std::min<std::chrono::nanoseconds>(limit, std::chrono::hours(24 * 365));
  std::unique_lock lock(mutex_);
  const Attending attending(engine_);
  while (!work.done()) {
    // What does not take long once all have come is run here while there is time for them to come. The rest is left to
    // the progress thread: who has little time cannot take on what may take longer.
    const auto left = until - Clock::now();
    if (left >= kWorthRunning && !running_ && !queue_.empty() && queue_.front()->is_quick()) {
      run_front(lock, until);
      continue;
    }
    if (dozing_ && !running_) work_to_do_.notify_one();
    if (work_done_.wait_until(lock, until) == std::cv_status::timeout) return work.done();
  }
  return true;
}

void Core::add_callback(QueuedWork& work, std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!work.done()) {
      work.callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Core::stop() {
  channels_.stop();
  bool in_callback = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    in_callback = runner_ == std::this_thread::get_id();
  }
  work_to_do_.notify_all();
  if (!progress_.joinable()) return;
  if (in_callback) {
    progress_.detach();  // the last handle went in a callback; the thread keeps the core and ends by itself
  } else {
    progress_.join();
  }
}

// Runs the first operation in the queue. The lock is held on entry and on return, not while it runs. If ranks have not
// come by `limit`, the operation stays in the queue for whoever takes it on next.
void Core::run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const std::shared_ptr<QueuedWork> work = queue_.front();
  limit_waiting();
  lock.unlock();
  std::optional<Error> error;
  const bool finished = run(*work, limit, error);
  lock.lock();
  if (!finished) {
    running_ = false;
    runner_ = std::thread::id();
    work_done_.notify_all();
    work_to_do_.notify_one();
    return;
  }
  queue_.pop_front();
  work->outcome_ = std::move(error);
  work->done_.store(true, std::memory_order_release);
  const auto callbacks = std::exchange(work->callbacks_, {});
  work_done_.notify_all();
  if (!callbacks.empty()) {  // still running, so that callbacks come in the order of the operations
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    lock.lock();
  }
  running_ = false;
  runner_ = std::thread::id();
  pending_.fetch_sub(1, std::memory_order_release);
  work_done_.notify_all();
  if (!queue_.empty()) work_to_do_.notify_one();
}

// False: ranks have not come by `limit`.
bool Core::run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error) noexcept {
  engine_.called_at(work.called_, work.requests_.front().timeout);
  if (work.requests_.size() > 1) {
    error = run_group(work);
    return true;
  }
  const Request& request = work.requests_.front();
  bool finished = true;
  error = guarded(request, work.called_, [&](CollectiveEvent* event) {
    if (!work.announced_) engine_.announce(request);
    work.announced_ = true;
    finished = limit == Clock::time_point::max() || engine_.await_peers(limit);
    if (finished) engine_.complete(request, event);
    return finished;
  });
  return finished || error.has_value();
}

// Operations behind the running one have deadlines as well.
void Core::limit_waiting() {
  auto earliest = Clock::time_point::max();
  for (const auto& work : queue_) earliest = std::min(earliest, work->deadline());
  engine_.limit_waiting(earliest);
}

void Core::progress() {
  ::pthread_setname_np(::pthread_self(), "cohort-comm");
  times::leave_out_this_thread();
  std::unique_lock lock(mutex_);
  while (true) {
    if (!queue_.empty() && !running_) {
      run_front(lock);
    } else if (stopping_ && queue_.empty()) {
      return;
    } else if (Clock::now() - enqueued_ < kAwake) {
      dozing_ = true;
      work_to_do_.wait_for(lock, world_.crowded() ? kDozeInCrowd : kDoze);
      dozing_ = false;
    } else {
      work_to_do_.wait(lock);
    }
  }
}

}  // namespace cohort::comm::local
