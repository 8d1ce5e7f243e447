// What stands behind a Work. A backend derives from it to say how its operations are waited for.
// Any thread may call; one at a time waits.
#pragma once

#include <cohort/buffer.h>
#include <cohort/error.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>

namespace cohort::comm {

/// Whether a stream has been put after a result.
enum class Ordering {
  Done,
  NotYet,  ///< nobody has been given the operation so far
  Never,   ///< there is nothing to wait for but the result itself, or it is there
};

class WorkState {
 public:
  virtual ~WorkState() = default;

  /// Returns once the operation has finished, which its deadline makes sure of.
  virtual void wait() = 0;
  /// The same, but for at most `limit`; true if it has finished.
  virtual bool wait_for(std::chrono::nanoseconds limit) = 0;
  /// Puts what this stream of a GPU is given from now on after the result, as soon as the GPU has been given the
  /// operation, for which it waits until `limit`. May carry out operations meanwhile. Throws Internal.
  virtual Ordering order(const Device& /*stream*/, std::chrono::steady_clock::time_point /*limit*/) {
    return Ordering::Never;
  }
  /// Whether this is the stream of all its buffers.
  virtual bool is_given_in(const Device& /*stream*/) const noexcept { return false; }
  virtual bool done() const noexcept = 0;
  /// Of a finished operation. It does not change any more.
  virtual const std::optional<Error>& outcome() const noexcept = 0;
  virtual void on_done(std::function<void()> callback) = 0;
  /// Of a finished receive from any source: whose message it took.
  virtual std::optional<int> source() const noexcept { return std::nullopt; }
  /// False in a forked child of the process that started it: then nothing of it may be touched.
  virtual bool at_home() const noexcept { return true; }

  /// Somebody has been given the error.
  std::atomic<bool> reported{false};
};

/// An operation that failed before it was started, or in the caller.
class FailedWork final : public WorkState {
 public:
  explicit FailedWork(Error error) : outcome_(std::move(error)) {}
  void wait() override {}
  bool wait_for(std::chrono::nanoseconds) override { return true; }
  bool done() const noexcept override { return true; }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override { callback(); }

 private:
  const std::optional<Error> outcome_;
};

}  // namespace cohort::comm
