// Operations that the ranks agree on here, and that are carried out elsewhere: by NCCL, which is given them one after
// the other, or else by staging.
#include "base/result.h"
#include "base/thread.h"
#include "comm/api/device_op.h"
#include "comm/engine/queue.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace cohort::comm {

/// What an operation that is carried out elsewhere needs of the plane.
class Queue::PeerPoller final : public DeviceOp::Ranks {
 public:
  PeerPoller(Queue& queue, const QueuedWork& work) : queue_(queue), work_(work) {}
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
    request.timeout = work_.requests_.front().timeout;
    bool announced = false;
    queue_.run_one(request, work_.called_, announced, Clock::time_point::max(), nullptr);
  }

 private:
  Queue& queue_;
  const QueuedWork& work_;
};

// Not finished: ranks have not come by `limit`, or it is in flight.
std::optional<Error> Queue::run_direct(QueuedWork& work, Clock::time_point limit, bool& finished,
                                       InFlight& given) noexcept {
  const std::span<const Request> requests = work.requests_;
  DeviceOp& direct = *requests.front().direct;
  std::vector<Request> staged;
  auto failed = guarded(requests.front(), work.called_, [&](CollectiveEvent* event) {
    Round round;
    PeerPoller others(*this, work);
    const auto agree = [&](Clock::time_point until) {
      Request agreed = requests.front();
      agreed.round = &round;
      const bool come = run_one(agreed, work.called_, work.announced_, until, event);
      if (come) work.announced_ = false;
      return come;
    };
    if (direct.open() && !agree(limit)) {
      finished = false;
      return false;
    }
    try {
      // What the plane tells is of its last round.
      if (round.everyone && direct.form(others)) agree(Clock::time_point::max());
      if (round.everyone) {
        await_room(kMostInFlight, work);
        watch_from_now_on();
        given = direct.run(requests, round, others);
      }
      if (given) {
        if (event != nullptr) work.event_ = *event;
        finished = false;
        return false;
      }
      await_room(1, work);
      for (const Request& request : requests) staged.push_back(request.direct->staged(request));
    } catch (const Error& error) {
      abort(error.what());
      throw;
    }
    return false;
  });
  if (failed && failed->code() != ErrorCode::Mismatch) direct.give_up();
  if (failed || !finished) return failed;
  if (staged.size() > 1) return run_group(staged, work);
  return run_single(staged.front(), work, Clock::time_point::max(), finished);
}

/// Pieces on their way to the plane: nobody but the event of the whole is told of them.
class Queue::PlaneOfPieces final : public Pieces::Plane {
 public:
  PlaneOfPieces(Queue& queue, const Request& whole, const QueuedWork& work, CollectiveEvent* event)
      : queue_(queue), whole_(whole), work_(work), event_(event) {}
  void carry_out(const Request& piece) override {
    Request own = piece;
    own.timeout = whole_.timeout;
    if (!queue_.lends()) own.borrowed = nullptr;
    CollectiveEvent part;
    if (event_ != nullptr) part.begun = Clock::now();
    run(own, event_ != nullptr ? &part : nullptr);
    if (event_ == nullptr) return;
    if (event_->sequence == 0) event_->sequence = part.sequence;
    event_->group = part.group;
    event_->waited += part.waited;
    event_->wire += part.wire;
    event_->wire_bytes += part.wire_bytes;
  }
  void attend() override { queue_.attend(); }

  /// They agree on the whole as on any operation, and refuse what does not go together.
  Round agree() {
    Round agreed{.everyone = true};
    if (queue_.ranks() == 1) return agreed;
    Request own = whole_;
    own.round = &agreed;
    run(own, event_);
    return agreed;
  }

 private:
  void run(const Request& request, CollectiveEvent* event) {
    bool announced = false;
    queue_.run_one(request, work_.called_, announced, Clock::time_point::max(), event);
  }
  Queue& queue_;
  const Request& whole_;
  const QueuedWork& work_;
  CollectiveEvent* const event_;
};

void Queue::run_pieces(const Request& request, const QueuedWork& work, CollectiveEvent* event) {
  PlaneOfPieces plane(*this, request, work, event);
  const Round agreed = plane.agree();
  try {
    request.pieces->run(agreed, work.deadline(), plane);
  } catch (const Error& error) {  // the others wait for this rank
    abort(error.what());
    throw;
  }
}

namespace {

// What a GPU has been given and has not done: looked at by whoever waits for it, and by a thread of its own, since it
// also has to end, or fail, while nobody waits. That thread looks after the other ranks as long as something is in
// flight, and stays until the ranks of this host have done what they were given together: so nobody leaves whose memory
// another still reads.

using namespace std::chrono_literals;

constexpr auto kLook = 5ms;          // between looks at the other ranks
constexpr auto kGrace = 1s;          // for what is in flight to say itself that it is late
constexpr auto kUnattended = 500us;  // between looks at what nobody waits for
constexpr auto kLeaving = 1ms;

}  // namespace

Ordering QueuedWork::order(const Device& stream, Clock::time_point limit) {
  if (!requests_.front().direct) return Ordering::Never;
  if (!queue_.wait_until_given(*this, limit)) return Ordering::NotYet;
  std::shared_ptr<DeviceOp::InFlight> given;
  {
    const std::lock_guard lock(queue_.mutex_);
    given = in_flight_;
  }
  if (!given) return Ordering::Never;
  given->put_before(stream);
  return Ordering::Done;
}

bool QueuedWork::is_given_in(const Device& stream) const noexcept {
  return std::all_of(requests_.begin(), requests_.end(), [&](const Request& request) {
    return request.device.index == stream.index && request.device.stream == stream.stream &&
           request.input_stream == stream.stream;
  });
}

// Under the mutex.
void Queue::put_in_flight(const std::shared_ptr<QueuedWork>& work, InFlight given) noexcept {
  work->in_flight_ = std::move(given);
  last_deadline_ = std::max(last_deadline_, work->deadline());
  in_flight_.push_back(work);
  to_watch_.notify_all();
}

bool Queue::look_in_flight() noexcept {
  const std::unique_lock turn(looking_, std::try_to_lock);
  if (!turn) return false;
  bool any = false;
  while (true) {
    std::shared_ptr<QueuedWork> first, late;
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return any;
      first = in_flight_.front();
      const auto now = Clock::now();
      for (const auto& work : in_flight_) {
        if (now < work->deadline()) continue;
        late = work;
        break;
      }
    }
    try {
      const bool over = first->in_flight_->over(first->deadline());
      if (!over && late && late != first) late->in_flight_->over(late->deadline());
      // NCCL's kernels may go on past a rank that has given up, with what is no data: whoever gives up says so before.
      if (!over || ended()) return any;
    } catch (const Error& error) {
      fail_in_flight(error);
      return true;
    } catch (const std::exception& error) {
      fail_in_flight(Error(ErrorCode::Internal, error.what()));
      return true;
    }
    end_in_flight(first, std::nullopt);
    any = true;
  }
}

/// The first. By whoever looks.
void Queue::end_in_flight(const std::shared_ptr<QueuedWork>& work, std::optional<Error> failed) noexcept {
  const Request& request = work->requests_.front();
  if (work->event_) tell(*work->event_, request, work->called_, failed.has_value());
  std::vector<std::function<void()>> callbacks;
  InFlight given;
  {
    const std::lock_guard lock(mutex_);
    in_flight_.pop_front();
    given = std::move(work->in_flight_);
    if (!failed) tell_over(++over_);
    work->set_outcome(std::move(failed));
    work->set_done();
    callbacks = work->take_callbacks();
    active_ = Clock::now();
    pending_.fetch_sub(1, std::memory_order_release);
    looker_ = std::this_thread::get_id();
  }
  work_done_.notify_all();
  for (const auto& callback : callbacks) callback();
  const std::lock_guard lock(mutex_);
  looker_ = std::thread::id();
}

/// All. By whoever looks.
void Queue::fail_in_flight(const Error& error) noexcept {
  abort(error.what());
  while (true) {
    std::shared_ptr<QueuedWork> first;
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return;
      first = in_flight_.front();
    }
    first->requests_.front().direct->give_up();
    end_in_flight(first, error);
  }
}

void Queue::await_room(std::size_t most, const QueuedWork& work) {
  cuda::Pauses pauses;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.size() < most) return;
    }
    attend();
    if (look_in_flight()) continue;
    if (Clock::now() >= work.deadline() + kGrace) {
      const Error late(
          ErrorCode::Timeout,
          fmt::format("{} timed out -- what the GPU was given before it is not over by its deadline -- a kernel hangs, "
                      "or the GPU is busy for longer than the operation's timeout",
                      name_of(work.requests_.front().kind)));
      abort(late.what());  // the others wait for this rank
      throw late;
    }
    pauses.take();
  }
}

void Queue::watch_from_now_on() {
  const std::lock_guard lock(mutex_);
  if (watching_) return;
  watcher_ = sys::start_without_signals([self = shared_from_this()] { self->watch(); });
  watching_ = true;
}

void Queue::watch() noexcept {
  ::pthread_setname_np(::pthread_self(), "cohort-gpu");
  times::leave_out_this_thread();
  cuda::Pauses pauses(kUnattended);
  auto looked = Clock::time_point{};
  std::unique_lock lock(mutex_);
  while (true) {
    if (!in_flight_.empty()) {
      bool well = true;
      const auto now = Clock::now();
      // An operation that runs looks after the ranks that it waits for.
      if (!running_ && now - looked >= kLook) {
        looked = now;
        running_ = true;
        pending_.fetch_add(1,
                           std::memory_order_relaxed);  // also once what is in flight is over: nobody runs beside this
        lock.unlock();
        well = look_after_others();
        lock.lock();
        pending_.fetch_sub(1, std::memory_order_release);
        running_ = false;
        work_done_.notify_all();
        if (!queue_.empty()) work_to_do_.notify_one();
      }
      lock.unlock();
      if (!well || !look_in_flight()) pauses.take();
      lock.lock();
    } else if (stopping_ && queue_.empty() && !running_) {
      break;
    } else {
      pauses.begin_again();
      if (stopping_) {
        to_watch_.wait_for(lock, kLeaving);
      } else {
        to_watch_.wait(lock);
      }
    }
  }
  while (!are_over(over_) && Clock::now() < last_deadline_) {
    lock.unlock();
    std::this_thread::sleep_for(kLeaving);
    lock.lock();
  }
  watching_ = false;
  work_to_do_.notify_all();
  lock.unlock();
  rouse();
}

/// False: the world has ended, and what is in flight with it.
bool Queue::look_after_others() noexcept {
  std::optional<Error> failed;
  try {
    attend();
  } catch (const Error& error) {
    failed = error;
  } catch (const std::exception& error) {
    failed = Error(ErrorCode::Internal, error.what());
  }
  if (!failed) return true;
  const std::lock_guard turn(looking_);
  fail_in_flight(*failed);
  return false;
}

}  // namespace cohort::comm
