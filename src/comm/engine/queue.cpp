#include "comm/engine/queue.h"

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

// Largest buffer that is copied together with others, since larger ones gain nothing.
constexpr std::size_t kFusedBuffer = std::size_t{64} << 10;

bool fusible(const Request& request) noexcept {
  // In a format with a scale for each block, an element's result would depend on its neighbours.
  return (request.kind == Kind::AllReduce || request.kind == Kind::Broadcast) && request.input == request.output &&
         request.input_bytes() <= kFusedBuffer && request.wire_format <= WireFormat::BFloat16;
}

bool alike(const Request& a, const Request& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.weighted == b.weighted &&
         a.wire_format == b.wire_format && a.weight == b.weight && a.prescale == b.prescale &&
         a.postscale == b.postscale;
}

/// Copies all inputs to `buffer`, which is large enough, and returns the one operation that carries out the requests in
/// place there. Its fingerprint has the counts of all requests, so ranks that fuse different requests are refused.
Request fuse(std::span<const Request> requests, std::byte* buffer) {
  Request together = requests.front();
  together.finite_check = nullptr;  // each request's check reads its own result, which is small
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

/// Copies each request's result from `buffer` to its output.
void unfuse(std::span<const Request> requests, const std::byte* buffer) {
  for (const Request& request : requests) {
    if (request.input_count > 0) std::memcpy(request.output, buffer, request.input_bytes());
    buffer += request.input_bytes();
  }
}

// A caller that waits for less than this runs no operations meanwhile.
constexpr auto kWorthRunning = std::chrono::milliseconds(1);

}  // namespace

std::size_t Turn::count_together(std::span<const Request> requests) noexcept {
  if (!fusible(requests.front())) return 1;
  std::size_t count = 1;
  std::size_t bytes = requests.front().input_bytes();
  while (count < requests.size() && fusible(requests[count]) && alike(requests.front(), requests[count]) &&
         bytes + requests[count].input_bytes() <= kFusedTotal) {
    bytes += requests[count++].input_bytes();
  }
  return count;
}

bool Turn::agree(const Request& whole, Round& round, CollectiveEvent* event) {
  Request own = whole;
  own.round = &round;
  const bool come = queue_.run_one(own, work_.called_, work_.announced_, limit_, event);
  if (come) work_.announced_ = false;
  return come;
}

void Turn::carry_out(const Request& part, CollectiveEvent* event) {
  Request own = part;
  if (own.timeout.count() == 0) own.timeout = work_.requests_.front().timeout;
  if (!queue_.lends()) own.borrowed = nullptr;
  CollectiveEvent taken;
  if (event != nullptr) taken.begun = Clock::now();
  bool announced = false;
  queue_.run_one(own, work_.called_, announced, Clock::time_point::max(), event != nullptr ? &taken : nullptr);
  if (event == nullptr) return;
  if (event->sequence == 0) event->sequence = taken.sequence;
  event->group = taken.group;
  event->waited += taken.waited;
  event->wire += taken.wire;
  event->wire_bytes += taken.wire_bytes;
}

void Turn::carry_out(std::span<const Request> together, CollectiveEvent* event) {
  if (together.size() == 1) return carry_out(together.front(), event);
  std::byte* const buffer = queue_.fusing();
  const Request all = fuse(together, buffer);
  if (event != nullptr) event->bytes = all.payload();
  carry_out(all, event);
  unfuse(together, buffer);
}

void Turn::exchange(const void* own, void* all, std::size_t bytes) {
  Request request;
  request.kind = Kind::AllGather;
  request.dtype = DType::Int8;
  request.input = own;
  request.input_count = static_cast<std::int64_t>(bytes);
  request.output = all;
  request.output_count = request.input_count * queue_.ranks();
  carry_out(request, nullptr);
}

void Turn::attend() { queue_.attend(); }

Turn::Clock::time_point Turn::deadline() const noexcept { return queue_.waiters_.deadline.when(); }

QueuedWork::QueuedWork(std::shared_ptr<Queue> queue, std::vector<Request> requests, Clock::time_point called,
                       bool announced)
    : PendingWork(*queue, queue), requests_(std::move(requests)), called_(called), announced_(announced) {}

Work Queue::submit_group(std::vector<Request> requests) {
  if (requests.empty()) return {};
  if (requests.size() == 1) return submit(requests.front());
  return enqueue(std::make_shared<QueuedWork>(shared_from_this(), std::move(requests), Clock::now(), false));
}

Work Queue::submit(std::shared_ptr<Composite> composite, const Request& whole, bool now) {
  auto work = std::make_shared<QueuedWork>(shared_from_this(), std::vector{whole}, Clock::now(), false);
  work->composite_ = std::move(composite);
  return enqueue(std::move(work), now);
}

Work Queue::enqueue(const Request& request, Clock::time_point called, bool announced) {
  return enqueue(std::make_shared<QueuedWork>(shared_from_this(), std::vector{request}, called, announced));
}

Work Queue::enqueue(std::shared_ptr<QueuedWork> work, bool now) {
  bool roused = true;
  {
    const std::lock_guard lock(mutex_);
    roused = wants_rousing();
    if (now) leave_to_thread();
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
  if (work.done()) return true;
  const bool patient = limit == Clock::time_point::max();
  std::unique_lock lock(mutex_);
  const WaiterCount counted(waiters_);
  while (!work.done()) {
    // Without a deadline, this caller runs any operation. With one, it runs only operations that are quick once all
    // ranks have come, while time is left for them to come; others may take too long and are left to the thread.
    const bool idle = !running_ && !queue_.empty();
    if (idle && patient) {
      run_front(lock);
    } else if (patient) {
      work_done_.wait(lock);
    } else if (idle && may_be_quick(*queue_.front()) && limit - Clock::now() >= kWorthRunning) {
      run_front(lock, limit);
    } else {
      if (idle) leave_to_thread();
      if (work_done_.wait_until(lock, limit) == std::cv_status::timeout) return work.done();
    }
  }
  return true;
}

/// Called with the first operation in the queue, under the mutex.
bool Queue::may_be_quick(const QueuedWork& work) const noexcept {
  if (work.composite_) return work.composite_->is_quick() && is_quick({});
  return work.requests_.size() == 1 && is_quick(work.requests_.front());
}

bool Queue::is_in_callback() {
  const std::lock_guard lock(mutex_);
  const auto here = std::this_thread::get_id();
  return runner_ == here || caller_back_ == here || thread_.get_id() == here;
}

void Queue::call_back(const std::function<void()>& body) {
  {
    const std::lock_guard lock(mutex_);
    caller_back_ = std::this_thread::get_id();
  }
  body();
  const std::lock_guard lock(mutex_);
  caller_back_ = std::thread::id();
}

void Queue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_to_do_.notify_all();
  rouse();
  if (!thread_.joinable()) return;
  if (is_in_callback()) {
    thread_.detach();  // a callback destroyed the last handle; the thread keeps the queue alive and ends by itself
  } else {
    thread_.join();
  }
}

void Queue::keep() {
  const std::lock_guard lock(mutex_);
  ++keepers_;
}

void Queue::unkeep() {
  {
    const std::lock_guard lock(mutex_);
    --keepers_;
  }
  work_to_do_.notify_all();
  rouse();
}

bool Queue::is_leaving() {
  const std::lock_guard lock(mutex_);
  return stopping_ && queue_.empty() && !running_;
}

void Queue::keep_from_caller() {
  const std::lock_guard lock(mutex_);
  ++kept_from_caller_;
  pending_.fetch_add(1, std::memory_order_relaxed);
}

void Queue::release_caller() {
  const std::lock_guard lock(mutex_);
  --kept_from_caller_;
  active_ = Clock::now();
  pending_.fetch_sub(1, std::memory_order_release);
}

void Queue::attend_if_idle() {
  std::unique_lock lock(mutex_);
  if (running_ || kept_from_caller_ == 0) return;
  running_ = true;
  pending_.fetch_add(1, std::memory_order_relaxed);  // callers queue until this ends, even after `release_caller`
  lock.unlock();
  std::exception_ptr failed;
  try {
    attend();
  } catch (...) {
    failed = std::current_exception();
  }
  lock.lock();
  pending_.fetch_sub(1, std::memory_order_release);
  running_ = false;
  work_done_.notify_all();
  if (!queue_.empty()) work_to_do_.notify_one();
  lock.unlock();
  if (failed) std::rethrow_exception(failed);
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
  auto callbacks = work->take_callbacks();
  work_done_.notify_all();
  if (!callbacks.empty()) {  // `running_` is still set, so that callbacks are called in the order of the operations
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    callbacks.clear();  // without the mutex, since objects that callbacks hold may do anything in their destructors
    lock.lock();
  }
  running_ = false;
  runner_ = std::thread::id();
  active_ = Clock::now();
  pending_.fetch_sub(1, std::memory_order_release);
  work_done_.notify_all();
  if (!queue_.empty()) work_to_do_.notify_one();
}

// Returns false if ranks have not come by `limit`.
bool Queue::run(QueuedWork& work, Clock::time_point limit, std::optional<Error>& error) noexcept {
  bool finished = true;
  if (work.composite_) {
    Turn turn(*this, work, limit);
    error = work.composite_->run(turn, finished);
    if (error || finished) work.composite_.reset();
  } else if (work.requests_.size() > 1) {
    error = run_group(work);
  } else {
    error = guarded(work.requests_.front(), work.called_, [&](CollectiveEvent* event) {
      return finished = run_one(work.requests_.front(), work.called_, work.announced_, limit, event);
    });
  }
  return finished || error.has_value();
}

// Runs one operation after the other, and fuses small adjacent ones of one type into one buffer. Ranks whose groups
// differ anywhere disagree on the first operation, so it is refused. They skip the rest of the group, so that the
// operations after it still match on all ranks, even if one group is longer than the other.
std::optional<Error> Queue::run_group(QueuedWork& work) noexcept {
  Turn turn(*this, work, Clock::time_point::max());
  for (std::span<const Request> left(work.requests_); !left.empty();) {
    const auto together = left.first(Turn::count_together(left));
    left = left.subspan(together.size());
    auto failed = guarded(together.front(), work.called_, [&](CollectiveEvent* event) {
      turn.carry_out(together, event);
      return true;
    });
    if (failed) return failed;
  }
  return std::nullopt;
}

void Queue::tell(CollectiveEvent& event, const Request& request, Clock::time_point called, bool failed) noexcept {
  event.operation = name_of(request.kind);
  if (event.bytes == 0) event.bytes = request.payload();
  event.called = called == Clock::time_point{} ? event.begun : called;
  event.ended = Clock::now();
  event.failed = failed;
  if (timed_) times::add(event);
  if (Observer* const observer = observer_.load(std::memory_order_acquire)) observer->on_collective(event);
}

// Limits waits to the earliest deadline, since operations behind the running one have deadlines as well.
void Queue::set_limit() noexcept {
  auto earliest = Clock::time_point::max();
  for (const auto& work : queue_) earliest = std::min(earliest, work->deadline());
  waiters_.deadline.limit(earliest);
}

}  // namespace cohort::comm
