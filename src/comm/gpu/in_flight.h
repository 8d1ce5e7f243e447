// Works of operations on GPU memory, and InFlight: the unfinished operations that a communicator has queued on its
// GPU, in order. Waiting threads check them, and so does a thread of InFlight, since an operation also has to end or
// fail while no thread waits. That thread checks on the other ranks while operations are in flight, and stays until
// the ranks of this host have finished their common operations, so that no rank leaves while another reads its
// memory.
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

/// A Work that ends some time after another Work (`first`), which comes from the queue or the matcher.
class DeviceWork : public UnfinishedWork, public std::enable_shared_from_this<DeviceWork> {
 public:
  void wait() final { wait_until(std::nullopt); }
  bool wait_for(std::chrono::nanoseconds limit) final;
  void on_done(std::function<void()> callback) final { add_callback(mutex_, std::move(callback)); }
  std::optional<int> source() const noexcept final { return first_.source(); }
  bool at_home() const noexcept final { return ::getpid() == home_; }

  /// Sets the Work that this one follows. Call once.
  void follow(Work first);
  void finish(std::optional<Error> failed);

 protected:
  using Clock = std::chrono::steady_clock;

  /// Waits only for `first`. Returns false if it is not done by `limit`.
  bool wait_for_first(std::optional<Clock::time_point> limit);
  /// Called in the callback of `first`, when that is done.
  virtual void go_on(std::optional<Error> failed) noexcept = 0;
  /// Checks whether this Work is over. Any thread.
  virtual void look() noexcept = 0;

  std::mutex mutex_;

 private:
  bool wait_until(std::optional<Clock::time_point> limit);

  Work first_;
  const pid_t home_ = ::getpid();
};

/// One or several operations that are queued completely on a GPU, in the order of its stream.
class Flight {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Flight() = default;
  /// Returns true if the result is available. Throws Timeout if it is not available by `deadline`; Internal. Never true
  /// after `give_up`, since the state is then unknown.
  virtual bool over(Clock::time_point deadline) = 0;
  /// Makes all later work of the device's stream wait for the result. Any thread. Throws Internal.
  virtual void put_before(const Device& device) const = 0;
  /// Gives up the library's work because the world has ended. Any thread.
  virtual void give_up() noexcept = 0;
};

class InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::shared_ptr<Flight> flight;
    Clock::time_point deadline;
    std::function<void(std::optional<Error>)> end;  // reports the outcome
  };
  /// Maximum number of operations in flight. It bounds how far the host runs ahead of the GPU.
  static constexpr std::size_t kMost = 64;

  explicit InFlight(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}

  /// Called by an operation in its turn, once it has waited for a free entry.
  void put(Entry entry);
  bool has_room();
  /// Waits until fewer than `most` operations are in flight. `whole` is the waiting operation. Throws Timeout, or the
  /// error that ends the world.
  void await_room(std::size_t most, const Request& whole, Clock::time_point deadline, Turn& turn);
  /// Starts the thread. Called before the first operation is queued on the GPU. Throws std::system_error.
  void watch_from_now_on();
  /// Ends the operations that are over, in order. Returns false if there were none, or another thread is doing this.
  bool look() noexcept;
  /// Lets the thread end. Called when the queue has stopped, so no operation is added any more.
  void leave();
  /// Joins the thread, after `leave`. `in_callback`: the thread may be waiting for the calling thread.
  void join(bool in_callback);

 private:
  void watch() noexcept;
  void end_first(std::optional<Error> failed) noexcept;
  void fail_all(const Error& error) noexcept;
  bool check_on_others() noexcept;

  const std::shared_ptr<Queue> queue_;
  std::mutex looking_;  // locked before mutex_
  std::mutex mutex_;    // the last in the lock order
  std::deque<Entry> entries_;
  std::condition_variable changed_;
  std::uint64_t over_ = 0;  // number of operations that are over
  Clock::time_point last_deadline_{};
  bool leaving_ = false;
  std::thread watcher_;
};

}  // namespace cohort::comm::cuda
