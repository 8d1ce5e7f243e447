// Works of operations of a GPU's memory, and what a communicator's GPU has been given and has not done: in order,
// checked by threads that wait, and by a thread of its own, since an operation also has to end, or fail, while nobody
// waits. That thread checks on the other ranks as long as something is in flight, and stays until the ranks of this
// host have done what they were given together: so nobody leaves whose memory another still reads.
#pragma once

#include "comm/api/work_state.h"
#include "comm/engine/queue.h"
#include "comm/gpu/driver.h"

#include <cohort/work.h>

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace cohort::comm::cuda {

/// A Work that ends some time after another one, of the queue or of the matcher.
class DeviceWork : public UnfinishedWork, public std::enable_shared_from_this<DeviceWork> {
 public:
  void wait() final { wait_until(std::nullopt); }
  bool wait_for(std::chrono::nanoseconds limit) final;
  void on_done(std::function<void()> callback) final { add_callback(mutex_, std::move(callback)); }
  std::optional<int> source() const noexcept final { return first_.source(); }
  bool at_home() const noexcept final { return ::getpid() == home_; }

  /// It follows `first`. To be called once.
  void follow(Work first);
  void finish(std::optional<Error> failed);

 protected:
  using Clock = std::chrono::steady_clock;

  /// Waits for the other one only. False: it is not done by then.
  bool wait_for_first(std::optional<Clock::time_point> limit);
  /// The other one is done. In its callback.
  virtual void go_on(std::optional<Error> failed) noexcept = 0;
  /// Looks whether this one is over. Any thread.
  virtual void look() noexcept = 0;

  std::mutex mutex_;

 private:
  bool wait_until(std::optional<Clock::time_point> limit);

  Work first_;
  const pid_t home_ = ::getpid();
};

/// One or several operations of which a GPU has been given all, in the order of its stream.
class Flight {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Flight() = default;
  /// True if the result is there. `deadline`: until when it has to be. Throws Timeout, Internal. Never true once the
  /// library has been given up: then it cannot be known.
  virtual bool over(Clock::time_point deadline) = 0;
  /// Puts everything that this stream is given from now on after the result. Any thread. Throws Internal.
  virtual void put_before(const Device& device) const = 0;
  /// The world has ended: what the library does is given up. Any thread.
  virtual void give_up() noexcept = 0;
};

class InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::shared_ptr<Flight> flight;
    Clock::time_point deadline;
    std::function<void(std::optional<Error>)> end;  // reports to those concerned
  };
  /// The GPU has the next when one is over: the host runs no further ahead.
  static constexpr std::size_t kMost = 64;

  explicit InFlight(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}

  /// Called by an operation in its turn, once it has waited for a free entry.
  void put(Entry entry);
  bool has_room();
  /// Waits until less than `most` operations are in flight. `whole` is what waits for it. Throws what ends the world,
  /// Timeout.
  void await_room(std::size_t most, const Request& whole, Clock::time_point deadline, Turn& turn);
  /// Called before the first is given to the GPU. Throws std::system_error.
  void watch_from_now_on();
  /// Ends what is over, in order. False: nothing was, or another thread looks.
  bool look() noexcept;
  /// Nothing is put any more once the queue has stopped, and the thread ends then.
  void leave();
  /// Called after that. `in_callback`: the calling thread may be one that the thread waits for.
  void join(bool in_callback);

 private:
  void watch() noexcept;
  void end_first(std::optional<Error> failed) noexcept;
  void fail_all(const Error& error) noexcept;
  bool check_on_others() noexcept;

  const std::shared_ptr<Queue> queue_;
  std::mutex looking_;  // before mutex_
  std::mutex mutex_;    // the last of all
  std::deque<Entry> entries_;
  std::condition_variable changed_;
  std::uint64_t over_ = 0;  // that were in flight
  Clock::time_point last_deadline_{};
  bool leaving_ = false;
  std::thread watcher_;
};

}  // namespace cohort::comm::cuda
