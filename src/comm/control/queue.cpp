#include "comm/control/queue.h"

#include "comm/control/fusion.h"

#include <algorithm>
#include <utility>

namespace cohort::comm {
namespace {

// Who waits for less does not run operations meanwhile.
constexpr auto kWorthRunning = std::chrono::milliseconds(1);

/// Whether it is of the host's memory.
bool is_at_home(const Request& request) noexcept { return !request.staging && !request.pieces && !request.direct; }

}  // namespace

QueuedWork::QueuedWork(std::shared_ptr<Queue> queue, std::vector<Request> requests, Clock::time_point called,
                       bool announced)
    : PendingWork(*queue, queue), requests_(std::move(requests)), called_(called), announced_(announced) {}

Work Queue::submit_group(std::vector<Request> requests) {
  if (requests.empty()) return {};
  if (requests.size() == 1 && is_at_home(requests.front())) return submit(requests.front());
  return enqueue(std::move(requests), Clock::now(), false);
}

Work Queue::enqueue(std::vector<Request> requests, Clock::time_point called, bool announced) {
  auto work = std::make_shared<QueuedWork>(shared_from_this(), std::move(requests), called, announced);
  bool roused = true;
  {
    const std::lock_guard lock(mutex_);
    roused = wants_rousing();
    pending_.fetch_add(1, std::memory_order_relaxed);
    queue_.push_back(work);
    set_limit();
    active_ = Clock::now();
  }
  if (roused) rouse();
  return Work(std::move(work));
}

int Queue::join(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const WaiterCount counted(waiters_);
  while (running_ || !queue_.empty()) {
    if (running_) {
      work_done_.wait(lock);
    } else {
      run_front(lock);
    }
  }
  running_ = true;
  pending_.fetch_add(1, std::memory_order_relaxed);
  waiters_.deadline.limit(Clock::time_point::max());
  lock.unlock();
  const auto finish = [&] {
    lock.lock();
    running_ = false;
    active_ = Clock::now();
    pending_.fetch_sub(1, std::memory_order_release);
  };
  try {
    const int last = run_join(patience);
    finish();
    return last;
  } catch (...) {
    finish();
    throw;
  }
}

bool Queue::wait_until(PendingWork& work, Clock::time_point limit) {
  if (work.done()) return true;
  const bool patient = limit == Clock::time_point::max();
  std::unique_lock lock(mutex_);
  const WaiterCount counted(waiters_);
  while (!work.done()) {
    // What does not take long once all have come is run here while there is time for them to come. The rest is left to
    // the thread: who has little time cannot take on what may take longer.
    const bool idle = !running_ && !queue_.empty();
    if (idle && patient) {
      run_front(lock);
    } else if (patient) {
      work_done_.wait(lock);
    } else if (idle && queue_.front()->requests_.size() == 1 && is_quick(queue_.front()->requests_.front()) &&
               is_at_home(queue_.front()->requests_.front()) && limit - Clock::now() >= kWorthRunning) {
      run_front(lock, limit);
    } else {
      if (idle) leave_to_thread();
      if (work_done_.wait_until(lock, limit) == std::cv_status::timeout) return work.done();
    }
  }
  return true;
}

void Queue::stop() {
  bool in_callback = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    in_callback = runner_ == std::this_thread::get_id();
  }
  work_to_do_.notify_all();
  rouse();
  if (!thread_.joinable()) return;
  if (in_callback || thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // the last handle went in a callback; the thread keeps the queue and ends by itself
  } else {
    thread_.join();
  }
}

void Queue::run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const std::shared_ptr<QueuedWork> work = queue_.front();
  set_limit();
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
  work->set_outcome(std::move(error));
  work->set_done();
  const auto callbacks = work->take_callbacks();
  work_done_.notify_all();
  if (!callbacks.empty()) {  // still running, so that callbacks come in the order of the operations
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    lock.lock();
  }
  running_ = false;
  runner_ = std::thread::id();
  active_ = Clock::now();
  pending_.fetch_sub(1, std::memory_order_release);
  work_done_.notify_all();
  if (!queue_.empty()) work_to_do_.notify_one();
}

template <class Way>
void Queue::step(std::span<const Request> requests, const Way& way) {
  try {
    for (const Request& request : requests) {
      if (request.staging) way(*request.staging);
    }
  } catch (const Error& error) {
    abort(error.what());
    throw;
  }
}

// False: ranks have not come by `limit`.
bool Queue::run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error) noexcept {
  bool finished = true;
  if (work.requests_.front().direct) {
    error = run_direct(work);
  } else if (work.requests_.size() > 1) {
    error = run_group(work.requests_, work);
  } else {
    error = run_single(work.requests_.front(), work, limit, finished);
  }
  return finished || error.has_value();
}

std::optional<Error> Queue::run_single(const Request& request, QueuedWork& work, Clock::time_point limit,
                                       bool& finished) noexcept {
  const std::span<const Request> one(&request, 1);
  return guarded(request, work.called_, [&](CollectiveEvent* event) {
    if (request.pieces) {
      run_pieces(request, work, event);
      return true;
    }
    step(one, [&](Staging& staging) { staging.arrive(work.deadline()); });
    finished = run_one(request, work.called_, work.announced_, limit, event);
    if (!finished) return false;
    step(one, [&](Staging& staging) {
      staging.depart();
      staging.finish(work.deadline());
    });
    return true;
  });
}

/// What an operation that is carried out elsewhere needs of the plane.
class Queue::Others final : public Direct::Ranks {
 public:
  Others(Queue& queue, const QueuedWork& work) : queue_(queue), work_(work) {}
  void attend() override { queue_.attend(); }
  Clock::time_point deadline() const override { return queue_.waiters_.deadline.when(); }
  void exchange(const void* own, void* all, std::size_t bytes) override {
    Request request;
    request.kind = Kind::AllGather;
    request.dtype = DType::Int8;
    request.input = own;
    request.input_count = static_cast<std::int64_t>(bytes);
    request.output = all;
    request.output_count = request.input_count * queue_.ranks();
    run(std::move(request));
  }
  void meet() override { run({}); }

 private:
  void run(Request request) {
    request.timeout = work_.requests_.front().timeout;
    bool announced = false;
    queue_.run_one(request, work_.called_, announced, Clock::time_point::max(), nullptr);
  }
  Queue& queue_;
  const QueuedWork& work_;
};

std::optional<Error> Queue::run_direct(QueuedWork& work) noexcept {
  const std::span<const Request> requests = work.requests_;
  Direct& direct = *requests.front().direct;
  bool carried_out = false;
  std::vector<Request> staged;
  auto failed = guarded(requests.front(), work.called_, [&](CollectiveEvent* event) {
    Round round;
    Others others(*this, work);
    const auto agree = [&] {
      Request agreed = requests.front();
      agreed.round = &round;
      work.announced_ = false;
      run_one(agreed, work.called_, work.announced_, Clock::time_point::max(), event);
    };
    if (direct.open()) agree();
    try {
      if (round.everyone && direct.form(others)) agree();  // what the plane tells is of its last round
      carried_out = round.everyone && direct.run(requests, round, others);
      if (carried_out) return true;
      for (const Request& request : requests) staged.push_back(request.direct->staged(request));
    } catch (const Error& error) {
      abort(error.what());
      throw;
    }
    return false;
  });
  if (failed && failed->code() != ErrorCode::Mismatch) direct.give_up();
  if (failed || carried_out) return failed;
  if (staged.size() > 1) return run_group(staged, work);
  bool finished = true;
  work.announced_ = false;
  return run_single(staged.front(), work, Clock::time_point::max(), finished);
}

// One operation after the other, where neighbours that are small and alike travel in one buffer. Ranks whose groups
// differ anywhere differ in the first operation and are refused there. They leave the rest, so that a group counts as
// one call and what follows it still meets, also where one group is longer than the other.
std::optional<Error> Queue::run_group(std::span<const Request> requests, const QueuedWork& work) noexcept {
  for (std::size_t begin = 0; begin < requests.size();) {
    const std::size_t count = fusible_run(requests.subspan(begin));
    Request request = requests[begin];
    std::optional<Error> failed = guarded(request, work.called_, [&](CollectiveEvent* event) {
      if (request.pieces) {
        run_pieces(request, work, event);
        return true;
      }
      bool announced = false;
      std::byte* const buffer = count > 1 ? fusing() : nullptr;
      const std::span<const Request> together = requests.subspan(begin, count);
      step(together, [&](Staging& staging) { staging.arrive(work.deadline()); });
      if (count > 1) request = fuse(together, buffer);
      run_one(request, work.called_, announced, Clock::time_point::max(), event);
      if (count > 1) unfuse(together, buffer);
      step(together, [](Staging& staging) { staging.depart(); });
      return true;
    });
    if (failed) return failed;
    begin += count;
  }
  // One's output is on its way while the next is carried out.
  try {
    step(requests, [&](Staging& staging) { staging.finish(work.deadline()); });
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// Operations behind the running one have deadlines as well.
void Queue::set_limit() noexcept {
  auto earliest = Clock::time_point::max();
  for (const auto& work : queue_) earliest = std::min(earliest, work->deadline());
  waiters_.deadline.limit(earliest);
}

}  // namespace cohort::comm
