#include "comm/local/local_communicator.h"

#include "base/log.h"
#include "base/result.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <utility>

namespace cohort::comm::local {
namespace {

using Clock = std::chrono::steady_clock;

class LocalBlock final : public MemoryBlock {
 public:
  LocalBlock(std::shared_ptr<sys::Mapping> segment, std::size_t asked, std::uint32_t id,
             const std::shared_ptr<Mesh>& mesh, std::shared_ptr<ForkGuard> guard)
      : segment_(std::move(segment)), id_(id), mesh_(mesh), guard_(std::move(guard)) {
    data = segment_->data();
    bytes = asked;
  }
  ~LocalBlock() override {
    if (guard_->in_child()) {
      // The mesh belongs to the parent; this child's mapping goes when the child does.
      static_cast<void>(new std::shared_ptr<sys::Mapping>(std::move(segment_)));
      return;
    }
    if (const auto mesh = mesh_.lock()) mesh->free_segment(id_);
  }

 private:
  std::shared_ptr<sys::Mapping> segment_;
  const std::uint32_t id_;
  const std::weak_ptr<Mesh> mesh_;
  const std::shared_ptr<ForkGuard> guard_;
};

/// Counts the caller among those who wait for results.
class Attending {
 public:
  explicit Attending(Engine& engine) : engine_(engine) { engine_.attended().fetch_add(1, std::memory_order_relaxed); }
  ~Attending() { engine_.attended().fetch_sub(1, std::memory_order_relaxed); }
  Attending(const Attending&) = delete;
  Attending& operator=(const Attending&) = delete;

 private:
  Engine& engine_;
};

}  // namespace

// --- QueuedWork ---

void QueuedWork::wait() { core_->wait_for(*this); }
bool QueuedWork::wait_for(std::chrono::nanoseconds limit) { return core_->wait_for(*this, limit); }
void QueuedWork::on_done(std::function<void()> callback) { core_->add_callback(*this, std::move(callback)); }
bool QueuedWork::at_home() const noexcept { return !core_->in_child(); }

// --- Core ---

Work Core::submit(Operation operation) {
  operation.called = Clock::now();
  std::unique_lock lock(mutex_);
  if (queue_.empty() && !running_ && Engine::is_quick(operation)) {
    running_ = true;
    lock.unlock();
    std::optional<Error> error;
    {
      const Attending attending(engine_);
      engine_.limit_waiting(operation.deadline());
      error = run(operation);
    }
    lock.lock();
    running_ = false;
    lock.unlock();
    return error ? Work(std::make_shared<FailedWork>(*std::move(error))) : Work();
  }
  auto work = std::make_shared<QueuedWork>(shared_from_this(), operation);
  queue_.push_back(work);
  limit_waiting();
  if (!progress_.joinable()) {
    // Signals are for the program's own threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      progress_ = std::thread([self = shared_from_this()] { self->progress(); });
    } catch (const std::system_error& error) {  // then operations run when they are waited for
      log::warn("comm", "no progress thread, operations run when they are waited for -- {}", error.what());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  lock.unlock();
  work_to_do_.notify_one();
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
  engine_.limit_waiting(Clock::time_point::max());
  lock.unlock();
  const auto finish = [&] {
    lock.lock();
    running_ = false;
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
  // Without a progress thread nobody else would run it.
  std::unique_lock lock(mutex_);
  const Attending attending(engine_);
  return work_done_.wait_for(lock, std::min<std::chrono::nanoseconds>(limit, std::chrono::hours(24 * 365)),
                             [&] { return work.done(); });
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

// Runs the first operation in the queue. The lock is held on entry and on return, not while it runs.
void Core::run_front(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const std::shared_ptr<QueuedWork> work = queue_.front();
  limit_waiting();
  lock.unlock();
  std::optional<Error> error = run(work->operation_);
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
  work_done_.notify_all();
  if (!queue_.empty()) work_to_do_.notify_one();
}

std::optional<Error> Core::run(const Operation& operation) noexcept {
  Observer* const observer = observer_.load(std::memory_order_acquire);
  CollectiveEvent event;
  if (observer != nullptr) event.begun = Clock::now();
  std::optional<Error> failed;
  try {
    engine_.run(operation, observer != nullptr ? &event : nullptr);
  } catch (const Error& error) {
    failed = error;
  } catch (const std::exception& error) {
    failed = Error(ErrorCode::Internal, std::string("unexpected in a collective -- ") + error.what());
    engine_.abort(error.what());
  }
  if (observer != nullptr) {
    event.operation = name_of(operation.kind);
    event.bytes = operation.payload();
    event.called = operation.called;
    event.ended = Clock::now();
    event.failed = failed.has_value();
    observer->on_collective(event);
  }
  return failed;
}

// Operations behind the running one have deadlines as well.
void Core::limit_waiting() {
  auto earliest = Clock::time_point::max();
  for (const auto& work : queue_) earliest = std::min(earliest, work->operation_.deadline());
  engine_.limit_waiting(earliest);
}

void Core::progress() {
  ::pthread_setname_np(::pthread_self(), "cohort-comm");
  std::unique_lock lock(mutex_);
  while (true) {
    work_to_do_.wait(lock, [&] { return (!queue_.empty() && !running_) || (stopping_ && queue_.empty()); });
    if (queue_.empty()) return;
    run_front(lock);
  }
}

// --- LocalCommunicator ---

LocalCommunicator::LocalCommunicator(const FormOptions& options)
    : placement_(options.placement), timeout_(options.timeout), core_(std::make_shared<Core>(options)) {}

LocalCommunicator::~LocalCommunicator() {
  if (core_->in_child()) {
    // A forked child: the threads and the world are the parent's. Nothing is touched.
    static_cast<void>(new std::shared_ptr<Core>(std::move(core_)));
    return;
  }
  core_->stop();
}

void LocalCommunicator::check_home() const {
  if (!core_->in_child()) return;
  raise(
      ErrorCode::InvalidArgument,
      "rank {}'s communicator belongs to the process that formed it -- this is a forked child of it (pid {}) -- use it "
      "in the parent only, or exec a program that joins a world of its own",
      placement_.rank, ::getpid());
}

Operation LocalCommunicator::operation(Kind kind, ConstBuffer input, Buffer output,
                                       std::optional<std::chrono::milliseconds> timeout) const {
  check_home();
  Operation result;
  result.kind = kind;
  result.dtype = output.dtype;
  result.input = input.data;
  result.output = output.data;
  result.input_bytes = input.bytes();
  result.output_bytes = output.bytes();
  result.count = std::min(input.count, output.count);
  result.timeout = timeout.value_or(timeout_);
  return result;
}

Work LocalCommunicator::all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options) {
  Operation made = operation(Kind::AllReduce, input, output, options.timeout);
  made.op = options.op;
  made.weight = options.weight;
  return core_->submit(made);
}

Work LocalCommunicator::reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options) {
  Operation made = operation(Kind::ReduceScatter, input, output, options.timeout);
  made.op = options.op;
  return core_->submit(made);
}

Work LocalCommunicator::all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options) {
  return core_->submit(operation(Kind::AllGather, input, output, options.timeout));
}

Work LocalCommunicator::broadcast(Buffer data, const BroadcastOptions& options) {
  Operation made = operation(Kind::Broadcast, data, data, options.timeout);
  made.root = options.root;
  return core_->submit(made);
}

Work LocalCommunicator::barrier(const BarrierOptions& options) {
  return core_->submit(operation(Kind::Barrier, {}, {}, options.timeout));
}

std::shared_ptr<MemoryBlock> LocalCommunicator::allocate(std::size_t bytes, Device) {
  check_home();
  std::uint32_t id = 0;
  auto segment = core_->engine().mesh()->create_segment(std::max<std::size_t>(bytes, 1), id);
  if (!segment) {
    ErrorContext context;
    context.rank = placement_.rank;
    context.host = placement_.host;
    throw Error(segment.error().code(),
                fmt::format("allocate({}) failed -- rank {} ({}) -- {}", bytes, placement_.rank, placement_.host,
                            segment.error().what()),
                std::move(context));
  }
  return std::make_shared<LocalBlock>(*std::move(segment), bytes, id, core_->engine().mesh(), core_->guard());
}

int LocalCommunicator::join(const BarrierOptions& options) {
  check_home();
  return core_->join(options.timeout.value_or(timeout_));
}

void LocalCommunicator::abort(std::string_view reason) {
  check_home();
  core_->engine().abort(reason);
}

}  // namespace cohort::comm::local
