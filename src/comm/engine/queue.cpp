#include "comm/engine/queue.h"

#include "comm/api/device_op.h"
#include "comm/engine/pending_work.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace cohort::comm {

Deadline::Clock::time_point Deadline::when() const noexcept { return std::min(called_ + timeout_, limit()); }

std::string Deadline::after() const {
  return called_ + timeout_ <= limit() ? fmt::format("after {} ms", timeout_.count()) : "(an operation behind it did)";
}

std::string list_missing(const std::vector<int>& missing, const std::function<std::string(int)>& described) {
  constexpr std::size_t kMostListed = 8;
  std::vector<std::string> who;
  for (const int rank : missing) {
    if (who.size() == kMostListed) {
      who.push_back(fmt::format("and {} more", missing.size() - who.size()));
      break;
    }
    who.push_back(described(rank));
  }
  return fmt::format("{}", fmt::join(who, "; "));
}

std::string timeout_text(const RunningOperation& operation, const Deadline& deadline, const std::string& missing) {
  return fmt::format(
      "{} timed out {} -- rank {} ({}), operation {} -- {} -- is it stopped, slow, or in another branch "
      "of the program? give a longer timeout if it is only slow",
      operation.text, deadline.after(), operation.rank, operation.host, operation.number, missing);
}

std::string lost_text(const RunningOperation& operation, int peer, std::string_view host, std::string_view pid,
                      std::string_view how) {
  return fmt::format(
      "{} failed -- rank {} ({}) lost rank {} ({}{}{}) in operation {} -- {} -- see the output of rank "
      "{}; form a new communicator",
      operation.text, operation.rank, operation.host, peer, host, pid.empty() ? "" : ", ", pid, operation.number, how,
      peer);
}

namespace {

// Larger buffers gain nothing from being copied together.
constexpr std::size_t kFusedBuffer = std::size_t{64} << 10;

bool fusible(const Request& request) noexcept {
  return (request.kind == Kind::AllReduce || request.kind == Kind::Broadcast) && request.input == request.output &&
         request.input_bytes() <= kFusedBuffer && !request.pieces;
}

bool alike(const Request& a, const Request& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.weighted == b.weighted &&
         a.bf16_wire == b.bf16_wire && a.weight == b.weight && a.prescale == b.prescale && a.postscale == b.postscale;
}

/// How many of `requests`, from the first on, can travel as one; at least 1.
std::size_t fusible_run(std::span<const Request> requests) noexcept {
  if (!fusible(requests.front())) return 1;
  std::size_t count = 1;
  std::size_t bytes = requests.front().input_bytes();
  while (count < requests.size() && fusible(requests[count]) && alike(requests.front(), requests[count]) &&
         bytes + requests[count].input_bytes() <= kFusedTotal) {
    bytes += requests[count++].input_bytes();
  }
  return count;
}

/// The operation that carries them out, in place in `buffer`, which has room for all their inputs and gets them here.
/// The counts of all are in its fingerprint, so ranks that group otherwise are refused.
Request fuse(std::span<const Request> requests, std::byte* buffer) {
  Request together = requests.front();
  together.finite_check = nullptr;  // each looks at its own result, which is small
  together.input = together.output = buffer;
  together.input_count = 0;
  Counts counts;
  for (const Request& request : requests) {
    counts.input.push_back(request.input_count);
    together.input_count += request.input_count;
    if (request.input_count > 0) std::memcpy(buffer, request.input, request.input_bytes());
    buffer += request.input_bytes();
  }
  together.output_count = together.input_count;
  together.counts = std::make_shared<const Counts>(std::move(counts));
  return together;
}

/// Gives each its result.
void unfuse(std::span<const Request> requests, const std::byte* buffer) {
  for (const Request& request : requests) {
    if (request.input_count > 0) std::memcpy(request.output, buffer, request.input_bytes());
    buffer += request.input_bytes();
  }
}

// Who waits for less does not run operations meanwhile.
constexpr auto kWorthRunning = std::chrono::milliseconds(1);

/// Whether it is of the host's memory.
bool is_at_home(const Request& request) noexcept { return !request.staging && !request.pieces && !request.direct; }

/// Whether it begins once what is in flight is over.
bool comes_after_gpu(const Request& request) noexcept {
  return request.staging || request.pieces || request.kind == Kind::Barrier;
}

/// What takes the GPU longer than it takes to wake a thread that gives it to the GPU.
bool is_large_of_gpu(std::span<const Request> requests) noexcept {
  constexpr std::size_t kLarge = std::size_t{1} << 20;
  std::size_t bytes = 0;
  for (const Request& request : requests) bytes += request.direct ? request.payload() : 0;
  return bytes >= kLarge;
}

}  // namespace

QueuedWork::QueuedWork(std::shared_ptr<Queue> queue, std::vector<Request> requests, Clock::time_point called,
                       bool announced)
    : PendingWork(*queue, queue),
      queue_(*queue),
      requests_(std::move(requests)),
      called_(called),
      announced_(announced) {}

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
    if (is_large_of_gpu(work->requests_)) leave_to_thread();
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
  while (running_ || !queue_.empty() || !in_flight_.empty()) {
    if (!running_ && !queue_.empty()) {
      run_front(lock);
    } else {
      work_done_.wait(lock);
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
  return await(
      static_cast<QueuedWork&>(work), [] { return false; }, limit);
}

bool Queue::wait_until_given(QueuedWork& work, Clock::time_point limit) {
  return await(
      work, [&] { return work.in_flight_ != nullptr; }, limit);
}

/// Until it is done, or `ready` under the mutex.
template <class Ready>
bool Queue::await(const QueuedWork& work, const Ready& ready, Clock::time_point limit) {
  if (work.done()) return true;
  const bool patient = limit == Clock::time_point::max();
  cuda::Pauses pauses;
  std::unique_lock lock(mutex_);
  const WaiterCount counted(waiters_);
  while (!work.done() && !ready()) {
    if (work.in_flight_) {
      lock.unlock();
      if (!look_in_flight() && !work.done()) {
        if (!patient && Clock::now() >= limit) return false;
        pauses.take();
      }
      lock.lock();
      continue;
    }
    // What does not take long once all have come is run here while there is time for them to come. The rest is left to
    // the thread: a caller with a deadline cannot take on what may take longer.
    const bool idle = !running_ && !queue_.empty();
    if (idle && patient) {
      run_front(lock);
    } else if (patient) {
      work_done_.wait(lock);
    } else if (idle && may_be_quick(*queue_.front()) && limit - Clock::now() >= kWorthRunning) {
      run_front(lock, limit);
    } else {
      if (idle) leave_to_thread();
      if (work_done_.wait_until(lock, limit) == std::cv_status::timeout) return work.done() || ready();
    }
  }
  return true;
}

/// Of the first, under the mutex.
bool Queue::may_be_quick(const QueuedWork& work) const noexcept {
  const Request& first = work.requests_.front();
  if (first.direct) return first.direct->ready() && in_flight_.size() < kMostInFlight && is_quick({});
  return work.requests_.size() == 1 && is_quick(first) && is_at_home(first);
}

void Queue::stop() {
  bool in_callback = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    const auto here = std::this_thread::get_id();
    in_callback = runner_ == here || looker_ == here || thread_.get_id() == here;
  }
  work_to_do_.notify_all();
  to_watch_.notify_all();
  rouse();
  for (std::thread* const thread : {&thread_, &watcher_}) {
    if (!thread->joinable()) continue;
    if (in_callback) {
      thread->detach();  // the last handle went in a callback; the threads keep the queue and end by themselves
    } else {
      thread->join();
    }
  }
}

void Queue::run_front(std::unique_lock<std::mutex>& lock, Clock::time_point limit) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const std::shared_ptr<QueuedWork> work = queue_.front();
  set_limit();
  lock.unlock();
  std::optional<Error> error;
  InFlight given;
  const bool finished = run(*work, limit, error, given);
  lock.lock();
  if (given) {
    queue_.pop_front();
    put_in_flight(work, std::move(given));
  }
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

// False: ranks have not come by `limit`, or it is in flight.
bool Queue::run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error, InFlight& given) noexcept {
  bool finished = true;
  if (work.requests_.front().direct) {
    error = run_direct(work, limit, finished, given);
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
    if (comes_after_gpu(request)) await_room(1, work);
    if (request.pieces) {
      run_pieces(request, work, event);
      return true;
    }
    step(one, [&](Staging& staging) { staging.arrive(work.deadline(), [this] { attend(); }); });
    finished = run_one(request, work.called_, work.announced_, limit, event);
    if (!finished) return false;
    step(one, [&](Staging& staging) {
      staging.depart();
      staging.finish(work.deadline(), [this] { attend(); });
    });
    return true;
  });
}

// One operation after the other, where neighbours that are small and alike travel in one buffer. Ranks whose groups
// differ anywhere differ in the first operation and are refused there. They leave the rest, so that a group counts as
// one call and what follows it still meets, also where one group is longer than the other.
std::optional<Error> Queue::run_group(std::span<const Request> requests, const QueuedWork& work) noexcept {
  for (std::size_t begin = 0; begin < requests.size();) {
    const std::size_t count = fusible_run(requests.subspan(begin));
    Request request = requests[begin];
    std::optional<Error> failed = guarded(request, work.called_, [&](CollectiveEvent* event) {
      bool announced = false;
      std::byte* const buffer = count > 1 ? fusing() : nullptr;
      const std::span<const Request> together = requests.subspan(begin, count);
      if (std::any_of(together.begin(), together.end(), comes_after_gpu)) await_room(1, work);
      if (request.pieces) {
        run_pieces(request, work, event);
        return true;
      }
      step(together, [&](Staging& staging) { staging.arrive(work.deadline(), [this] { attend(); }); });
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
    step(requests, [&](Staging& staging) { staging.finish(work.deadline(), [this] { attend(); }); });
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

void Queue::tell(CollectiveEvent& event, const Request& request, Clock::time_point called, bool failed) noexcept {
  event.operation = name_of(request.kind);
  event.bytes = request.payload();
  event.called = called == Clock::time_point{} ? event.begun : called;
  event.ended = Clock::now();
  event.failed = failed;
  if (timed_) times::add(event);
  if (Observer* const observer = observer_.load(std::memory_order_acquire)) observer->on_collective(event);
}

// Operations behind the running one have deadlines as well.
void Queue::set_limit() noexcept {
  auto earliest = Clock::time_point::max();
  for (const auto& work : queue_) earliest = std::min(earliest, work->deadline());
  waiters_.deadline.limit(earliest);
}

}  // namespace cohort::comm
