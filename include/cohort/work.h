// A collective under way. It progresses in the background; `wait` delivers its result or its error, and `synchronize`
// lets a GPU's stream wait for it. A Work may be waited for from any thread, by one thread at a time; callbacks run on
// the thread that finishes it.
#pragma once

#include <cohort/buffer.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace cohort {

class Communicator;
class Error;

namespace comm {
class FiniteCheck;
class WorkState;
}  // namespace comm

class [[nodiscard]] Work {
 public:
  /// A finished Work without an error.
  Work() noexcept;
  explicit Work(std::shared_ptr<comm::WorkState> state) noexcept;
  Work(Work&&) noexcept;
  /// Waits for the replaced Work first, as the destructor does.
  Work& operator=(Work&&) noexcept;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  /// Waits for an unfinished operation; if its deadline passes, the communicator is aborted. Logs, as a warning, an
  /// error that no `wait` has delivered. Never throws.
  ~Work();

  /// Blocks until the operation is done. Throws cohort::Error: Mismatch, PeerLost, Aborted, Timeout (the operation's
  /// own deadline passed). May be called again, with the same outcome.
  void wait();
  /// Like `wait()`, but stops waiting (the operation goes on) after `limit` and then returns false.
  bool wait_for(std::chrono::nanoseconds limit);
  /// For GPU buffers handled by NCCL, blocks until all ranks have agreed on the operation and the GPU has been given
  /// it, and orders all later work in `stream.stream` after its result; the host does not wait for the result. May be
  /// called again, for other streams; the destructor does not wait any more. The buffers have to live until the
  /// operation is done, or until the work now in that stream is done. For all other operations, same as `wait()`.
  /// Throws what `wait()` throws if the operation has already failed. If it fails later (a rank is lost, noticed within
  /// a second; NCCL or the stream hangs until the deadline), the world ends, the stream goes on, and the operation's
  /// output is undefined: `wait()`, `error()`, `done()` and the next operation of this communicator report the failure.
  /// Call one of them before relying on a result.
  void synchronize(const Device& stream);
  /// True if the buffers may be freed before the operation is done: `synchronize()` has ordered the buffers' streams
  /// after the operation, so that memory freed in the order of these streams is not reused before the operation is
  /// over.
  bool is_ordered() const noexcept { return ordered_; }
  /// Like `synchronize()`, but stops waiting (the operation goes on) after `limit` and then returns false.
  bool synchronize_for(const Device& stream, std::chrono::nanoseconds limit);
  /// True once the operation has finished, with or without an error. Never blocks.
  bool done() const noexcept;
  /// The error of a finished operation; empty while it runs and when it succeeded.
  std::optional<Error> error() const;
  /// For a successful all_reduce with AllReduceOptions::check_finite: false if the result (for a group, any result)
  /// holds a NaN or an infinity, in either part of complex numbers. The answer is the same on all ranks that ask before
  /// the result is changed: over several hosts, and in a world of one, the result is read here. Empty for everything
  /// else. Never blocks.
  std::optional<bool> finite() const;
  /// For a successful recv from kAnySource: the rank, in its communicator, that sent the message. Empty for everything
  /// else. Never blocks.
  std::optional<int> source() const;
  /// Calls `callback` when the operation has finished, immediately if it already has. `callback` must not throw, block,
  /// or start another operation of the same communicator.
  void on_done(std::function<void()> callback);

 private:
  friend class Communicator;

  bool synchronize_until(const Device& stream, std::chrono::steady_clock::time_point limit);

  std::shared_ptr<comm::WorkState> state_;
  bool synchronized_ = false;
  bool ordered_ = false;
  std::vector<std::shared_ptr<const comm::FiniteCheck>> finite_checks_;
};

}  // namespace cohort
