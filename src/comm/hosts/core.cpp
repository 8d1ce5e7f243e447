#include "comm/hosts/core.h"

#include "base/log.h"
#include "base/result.h"
#include "comm/fusion.h"
#include "comm/hosts/any_receive.h"
#include "comm/times.h"
#include "sys/thread.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;

/// Counts the caller among those who wait for results.
class Attending {
 public:
  explicit Attending(Engine::Audience& audience) : audience_(audience), of_program_(sys::in_service_thread() ? 0 : 1) {
    audience_.attended.fetch_add(1, std::memory_order_relaxed);
    audience_.awaited.fetch_add(of_program_, std::memory_order_relaxed);
  }
  ~Attending() {
    audience_.attended.fetch_sub(1, std::memory_order_relaxed);
    audience_.awaited.fetch_sub(of_program_, std::memory_order_relaxed);
  }
  Attending(const Attending&) = delete;
  Attending& operator=(const Attending&) = delete;

 private:
  Engine::Audience& audience_;
  const int of_program_;
};

// Who starts an operation mostly waits for it next, and then runs it itself: the thread looks by itself this often
// whether one has been left to it, for a while after the last; then it sleeps until it is woken.
constexpr auto kDoze = 1ms;
constexpr auto kAwake = 20ms;
constexpr auto kLeft = 200us;   // an operation that nobody has taken on for this long is the thread's
constexpr auto kAsleep = 50ms;  // between looks at how the world is
constexpr auto kLeaving = 15s;  // for what was sent to be taken
constexpr auto kTelling = 1s;   // for others to be told why the world ended

}  // namespace

void QueuedWork::wait() { core_->wait_for(*this); }
bool QueuedWork::wait_for(std::chrono::nanoseconds limit) { return core_->wait_for(*this, limit); }
void QueuedWork::on_done(std::function<void()> callback) { core_->add_callback(*this, std::move(callback)); }
bool QueuedWork::at_home() const noexcept { return !core_->in_child(); }

Core::Core(const FormOptions& options, std::unique_ptr<Place> place)
    : world_(options, std::move(place)),
      post_({world_, observer_, drivers_, [this]() -> std::shared_ptr<void> { return shared_from_this(); },
             [this] { return in_child(); }}),
      engine_(world_, audience_, [this] { post_.look_after(); }) {}

void Core::begin() {
  thread_ = sys::start_without_signals([self = shared_from_this()] { self->serve(); });
}

// --- calls ---

Work Core::submit(std::vector<Request> requests) {
  if (requests.empty()) return {};
  auto work = std::make_shared<QueuedWork>(shared_from_this(), std::move(requests), Clock::now());
  bool rouse = false;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(work);
    active_ = work->called_;
    limit_waiting();
    rouse = asleep_;
  }
  if (rouse) world_.transport().wake();
  return Work(std::move(work));
}

Work Core::submit_message(const Request& request) {
  const Layout& layout = world_.layout();
  if (request.root == kAnySource && layout.locals > 1) return receive_any(request);
  if (request.root == kAnySource || layout.host_of(request.root) != layout.host) return post_.submit(request);
  Request own = request;
  own.root = layout.local_of(request.root);
  return world_.local().start(own);
}

/// In both places, in turns first in the one and in the other, so that neither keeps the other waiting.
Work Core::receive_any(const Request& request) {
  const auto claim = std::make_shared<Claim>();
  Request there = request;
  Request here = request;
  there.claim = here.claim = claim;
  here.timeout += kTelling;  // the post looks after the deadline, and names all ranks
  const auto receive =
      std::make_shared<AnyReceive>(claim, world_.layout(), [self = shared_from_this()] { return self->in_child(); });
  if (here_first_.exchange(!here_first_.load())) {
    receive->here = world_.local().start(here);
    receive->there = post_.submit(there);
  } else {
    receive->there = post_.submit(there);
    receive->here = world_.local().start(here);
  }
  receive->begin();
  return Work(receive);
}

int Core::join(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const Attending attending(audience_);
  while (running_ || !queue_.empty()) {
    if (running_) {
      work_done_.wait(lock);
    } else {
      run_front(lock);
    }
  }
  running_ = true;
  engine_.limit_waiting(Clock::time_point::max());
  lock.unlock();
  const auto finish = [&] {
    lock.lock();
    running_ = false;
    active_ = Clock::now();
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
  const Attending attending(audience_);
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
  const auto until = Clock::now() + std::min<std::chrono::nanoseconds>(limit, 24h * 365);
  std::unique_lock lock(mutex_);
  const Attending attending(audience_);
  // Whoever has little time leaves the operation to the thread.
  if (!running_ && !queue_.empty()) {
    work_to_do_.notify_one();
    if (asleep_) world_.transport().wake();
  }
  return work_done_.wait_until(lock, until, [&] { return work.done(); });
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

void Core::abort(std::string_view reason) {
  const Layout& layout = world_.layout();
  world_.end(ErrorCode::Aborted, -1, world_.subject().number(),
             fmt::format("aborted by rank {} on {} -- {}", layout.rank, world_.options().placement.host, reason));
  world_.transport().wake();
}

void Core::stop() {
  bool in_callback = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    in_callback = runner_ == std::this_thread::get_id();
  }
  work_to_do_.notify_all();
  world_.transport().wake();
  if (!thread_.joinable()) return;
  if (in_callback || thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // the last handle went in a callback; the thread keeps the core and ends by itself
  } else {
    thread_.join();
  }
}

// --- running ---

// Runs the first operation in the queue. The lock is held on entry and on return, not while it runs.
void Core::run_front(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const std::shared_ptr<QueuedWork> work = queue_.front();
  limit_waiting();
  lock.unlock();
  std::optional<Error> error = run(*work);
  lock.lock();
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
  active_ = Clock::now();
  work_done_.notify_all();
  if (!queue_.empty()) work_to_do_.notify_one();
}

// Ranks whose groups differ anywhere differ in the first operation and are refused there. They leave the rest, so that
// a group counts as one call and what follows it still meets, also where one group is longer than the other.
std::optional<Error> Core::run(QueuedWork& work) noexcept {
  const std::span<const Request> requests = work.requests_;
  try {
    for (std::size_t begin = 0; begin < requests.size();) {
      const std::size_t count = fusible_run(requests.subspan(begin));
      if (count > 1) {
        run_fused(requests.subspan(begin, count), work.called_);
      } else {
        run_one(requests[begin], work.called_);
      }
      begin += count;
    }
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    abort(error.what());
    return Error(ErrorCode::Internal, std::string("unexpected in a collective -- ") + error.what());
  }
}

void Core::run_one(const Request& request, Clock::time_point called) {
  Observer* const observer = observer_.load(std::memory_order_acquire);
  const bool timed = times::wanted();
  if (observer == nullptr && !timed) return engine_.run(request, called, nullptr);
  CollectiveEvent event;
  event.begun = Clock::now();
  const auto report = [&](bool failed) {
    event.operation = name_of(request.kind);
    event.bytes = request.payload();
    event.called = called;
    event.ended = Clock::now();
    event.failed = failed;
    if (timed) times::add(event);
    if (observer != nullptr) observer->on_collective(event);
  };
  try {
    engine_.run(request, called, &event);
  } catch (...) {
    report(true);
    throw;
  }
  report(false);
}

void Core::run_fused(std::span<const Request> requests, Clock::time_point called) {
  fusing_.resize(kFusedTotal);
  run_one(fuse(requests, fusing_.data()), called);
  unfuse(requests, fusing_.data());
}

// Operations behind the running one have deadlines as well.
void Core::limit_waiting() {
  auto earliest = Clock::time_point::max();
  for (const auto& work : queue_) earliest = std::min(earliest, work->deadline());
  engine_.limit_waiting(earliest);
}

/// The communicator's thread.
void Core::serve() {
  ::pthread_setname_np(::pthread_self(), "cohort-hosts");
  times::leave_out_this_thread();
  transport::Transport& transport = world_.transport();
  std::unique_lock lock(mutex_);
  while (true) {
    const auto now = Clock::now();
    if (!running_ && !queue_.empty() && (stopping_ || now - queue_.front()->called_ >= kLeft)) {
      run_front(lock);
      continue;
    }
    if (stopping_ && !running_ && queue_.empty() && post_.idle()) break;
    const bool driven = running_ || drivers_.load(std::memory_order_relaxed) > 0;
    const bool awake = driven || !queue_.empty() || now - active_ < kAwake;
    if (awake) {
      work_to_do_.wait_for(lock, kDoze);
    } else {
      asleep_ = true;
    }
    const bool drives = !running_ && drivers_.load(std::memory_order_relaxed) == 0;
    lock.unlock();
    if (!awake) {
      transport.sleep(kAsleep);
    } else if (drives) {
      transport.progress();
    }
    world_.tell_if_ended();
    post_.look_after();
    lock.lock();
    asleep_ = false;
  }
  lock.unlock();
  post_.look_after();  // a letter may have completed the last message while another thread drove
  const auto limit = Clock::now() + (world_.ended() ? kTelling : kLeaving);
  while (!transport.flushed() && Clock::now() < limit) transport.sleep(10ms);
  transport.leave();
}

}  // namespace cohort::comm::hosts
