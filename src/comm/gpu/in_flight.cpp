#include "comm/gpu/in_flight.h"

#include "base/result.h"
#include "base/thread.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace cohort::comm::cuda {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 5ms;          // between checks on the other ranks
constexpr auto kGrace = 1s;          // after a deadline: time for the operation in flight to report its timeout
constexpr auto kUnattended = 500us;  // between checks of operations that no thread waits for
constexpr auto kLeaving = 1ms;

}  // namespace

bool DeviceWork::wait_for(std::chrono::nanoseconds limit) {
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24 * 365);
  return wait_until(Clock::now() + std::min(limit, kLongest));
}

bool DeviceWork::wait_for_first(std::optional<Clock::time_point> limit) {
  try {
    if (limit) return first_.wait_for(*limit - Clock::now());
    first_.wait();
  } catch (const Error&) {  // `go_on` gets the error too
  }
  return true;
}

bool DeviceWork::wait_until(std::optional<Clock::time_point> limit) {
  if (done()) return true;
  if (!wait_for_first(limit)) return false;
  // Spin first: the GPU is usually done before a sleeping thread would wake.
  for (Pauses pauses(100us, 200us); !done(); pauses.take()) {
    look();
    if (limit && !done() && Clock::now() >= *limit) return done();
  }
  return true;
}

void DeviceWork::follow(Work first) {
  first_ = std::move(first);
  first_.on_done([self = shared_from_this()] { self->go_on(self->first_.error()); });
}

void DeviceWork::finish(std::optional<Error> failed) {
  set_outcome(std::move(failed));
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    set_done();
    callbacks = take_callbacks();
  }
  for (const auto& callback : callbacks) callback();
}

void InFlight::put(Entry entry) {
  queue_->keep_from_caller();
  const std::lock_guard lock(mutex_);
  last_deadline_ = std::max(last_deadline_, entry.deadline);
  entries_.push_back(std::move(entry));
  changed_.notify_all();
}

bool InFlight::has_room() {
  const std::lock_guard lock(mutex_);
  return entries_.size() < kMost;
}

void InFlight::await_room(std::size_t most, const Request& whole, Clock::time_point deadline, Turn& turn) {
  Pauses pauses;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (entries_.size() < most) return;
    }
    turn.attend();
    if (look()) continue;
    if (Clock::now() >= deadline + kGrace) {
      const Error late(
          ErrorCode::Timeout,
          fmt::format("{} timed out -- what the GPU was given before it is not over by its deadline -- a kernel hangs, "
                      "or the GPU is busy for longer than the operation's timeout",
                      name_of(whole.kind)));
      queue_->abort(late.what());  // the others wait for this rank
      throw late;
    }
    pauses.take();
  }
}

bool InFlight::look() noexcept {
  const std::unique_lock turn(looking_, std::try_to_lock);
  if (!turn) return false;
  bool any = false;
  while (true) {
    std::shared_ptr<Flight> first, late;
    Clock::time_point first_deadline, late_deadline;
    {
      const std::lock_guard lock(mutex_);
      if (entries_.empty()) return any;
      first = entries_.front().flight;
      first_deadline = entries_.front().deadline;
      const auto is_late = [now = Clock::now()](const Entry& entry) { return now >= entry.deadline; };
      const auto found = std::find_if(entries_.begin(), entries_.end(), is_late);
      if (found != entries_.end()) std::tie(late, late_deadline) = std::tie(found->flight, found->deadline);
    }
    try {
      const bool over = first->over(first_deadline);
      if (!over && late && late != first) late->over(late_deadline);
      // NCCL's kernels may finish without data from a rank that has given up; such a rank reports its error first.
      if (!over || queue_->ended()) return any;
    } catch (const Error& error) {
      fail_all(error);
      return true;
    } catch (const std::exception& error) {
      fail_all(Error(ErrorCode::Internal, error.what()));
      return true;
    }
    end_first(std::nullopt);
    any = true;
  }
}

/// Called with `looking_` held.
void InFlight::end_first(std::optional<Error> failed) noexcept {
  Entry first;
  {
    const std::lock_guard lock(mutex_);
    first = std::move(entries_.front());
    entries_.pop_front();
    if (!failed) queue_->tell_over(++over_);
  }
  queue_->release_caller();
  queue_->call_back([&] { first.end(std::move(failed)); });
}

/// Called with `looking_` held.
void InFlight::fail_all(const Error& error) noexcept {
  queue_->abort(error.what());
  while (true) {
    std::shared_ptr<Flight> first;
    {
      const std::lock_guard lock(mutex_);
      if (entries_.empty()) return;
      first = entries_.front().flight;
    }
    first->give_up();
    end_first(error);
  }
}

void InFlight::watch_from_now_on() {
  if (watcher_.joinable()) return;
  watcher_ = sys::start_without_signals([self = shared_from_this()] { self->watch(); });
  queue_->keep();
}

void InFlight::leave() {
  const std::lock_guard lock(mutex_);
  leaving_ = true;
  changed_.notify_all();
}

void InFlight::join(bool in_callback) {
  if (!watcher_.joinable()) return;
  if (in_callback) {
    watcher_.detach();
  } else {
    watcher_.join();
  }
}

void InFlight::watch() noexcept {
  ::pthread_setname_np(::pthread_self(), "cohort-gpu");
  times::leave_out_this_thread();
  Pauses pauses(kUnattended);
  auto looked = Clock::time_point{};
  std::unique_lock lock(mutex_);
  while (true) {
    if (!entries_.empty()) {
      lock.unlock();
      bool well = true;
      if (const auto now = Clock::now(); now - looked >= kLook) {
        looked = now;
        well = check_on_others();
      }
      if (!well || !look()) pauses.take();
      lock.lock();
    } else if (!leaving_) {
      pauses.begin_again();
      changed_.wait(lock);
    } else {
      lock.unlock();
      const bool over = queue_->is_leaving();
      lock.lock();
      if (over && entries_.empty()) break;
      changed_.wait_for(lock, kLeaving);
    }
  }
  while (!queue_->are_over(over_) && Clock::now() < last_deadline_) {
    lock.unlock();
    std::this_thread::sleep_for(kLeaving);
    lock.lock();
  }
  lock.unlock();
  queue_->unkeep();
}

/// Returns false if the world has ended, and with it the operations in flight.
bool InFlight::check_on_others() noexcept {
  std::optional<Error> failed;
  try {
    queue_->attend_if_idle();
  } catch (const Error& error) {
    failed = error;
  } catch (const std::exception& error) {
    failed = Error(ErrorCode::Internal, error.what());
  }
  if (!failed) return true;
  const std::lock_guard turn(looking_);
  fail_all(*failed);
  return false;
}

}  // namespace cohort::comm::cuda
