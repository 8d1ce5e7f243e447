// What a user holds of an operation that an Engine carries out: it can be waited for, and then gives its Outcome.
// Handles are shared by copying; any thread may call, several may wait. A Handle outlives its engine.
#pragma once

#include "comm/api/work_state.h"

#include <cohort/communicator.h>
#include <cohort/dtype.h>
#include <cohort/error.h>
#include <cohort/work.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace cohort::named {

/// What came of an operation beyond the buffers it was given. Fields that do not apply are empty.
struct Outcome {
  void* data = nullptr;                            ///< all_gather, reduce_scatter, all_to_all: the result
  std::shared_ptr<void> owner = {};                ///< keeps `data` if the engine allocated it
  DType dtype = DType::Float32;                    ///< of the result
  std::vector<std::int64_t> shape = {};            ///< of the result
  std::vector<std::int64_t> received_splits = {};  ///< all_to_all: rows from each rank; all_gather: of each rank
  int last_joined = -1;                            ///< join: the rank that joined last
  Communicator group = {};                         ///< form_group: belongs to no world on ranks that are not in it
};

class Wakeup;

/// Shared by Handles and the engine, which ends it once. Who waits for it urges the engine.
class State final : public comm::UnfinishedWork {
 public:
  /// `name`: for messages.
  State(std::shared_ptr<Wakeup> engine, std::string name);
  /// An error that nobody was given is logged, but for Aborted: who shuts down knows.
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  void on_done(std::function<void()> callback) override;
  bool at_home() const noexcept override;

  /// The engine's, before it ends.
  Outcome result;
  /// When all ranks had asked for it (unset if they never did), and when it ended: for timelines.
  std::chrono::steady_clock::time_point agreed_at = {};
  std::chrono::steady_clock::time_point ended_at = {};
  void end(std::optional<Error> error);

 private:
  void tell_timeline() const noexcept;

  const int process_;
  const std::chrono::steady_clock::time_point asked_at_;  // where there is a timeline
  const std::shared_ptr<Wakeup> engine_;
  const std::string name_;
  std::mutex mutex_;
  std::condition_variable ended_;
};

class Handle {
 public:
  explicit Handle(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}

  /// Blocks until the operation is done; the engine's timeout makes sure of it. Throws cohort::Error: Mismatch
  /// (ranks brought different things), Timeout (some never brought it), Aborted (the engine was shut down), or what
  /// ended the communicator. May be called again, with the same answer.
  void wait() { work().wait(); }
  /// As `wait`, for at most `limit`; false if it is not done by then.
  bool wait_for(std::chrono::nanoseconds limit) { return state_->wait_for(limit) && (wait(), true); }
  bool done() const noexcept { return state_->done(); }
  /// Waits likewise, and leaves the error to whoever asks for it. True if the operation is done.
  bool block(std::optional<std::chrono::nanoseconds> limit) {
    if (limit) return state_->wait_for(*limit);
    state_->wait();
    return true;
  }
  /// Calls `callback` on the engine's thread once it is done, or at once. It must not throw, block or call the engine.
  void on_done(std::function<void()> callback) { state_->on_done(std::move(callback)); }
  /// The error of an operation that is done; null if it succeeded. Who asks is taken to have heard of it.
  const Error* failure() const noexcept {
    const auto& error = state_->outcome();
    if (!error) return nullptr;
    state_->reported = true;
    return &*error;
  }
  bool at_home() const noexcept { return state_->at_home(); }
  /// Waits, then gives the outcome.
  const Outcome& outcome() {
    wait();
    return state_->result;
  }
  /// Of an operation that is done: see State.
  std::chrono::steady_clock::time_point agreed_at() const noexcept { return state_->agreed_at; }
  std::chrono::steady_clock::time_point ended_at() const noexcept { return state_->ended_at; }
  /// The same operation as a Work.
  Work work() const { return Work(state_); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace cohort::named
