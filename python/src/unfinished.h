// Operations that are under way, with their arrays, whoever drops what. Each owner (Member, NamedWorld) has one. Call
// with the GIL held.
#pragma once

#include "waiting.h"

#include <cohort/error.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace cohort::python {

/// Each has `done()` and `wait(limit)`, which is false if it is not over by then.
template <class OneOperation>
class Unfinished {
 public:
  explicit Unfinished(std::size_t least) : least_(least), tidy_at_(least) {}

  void keep(std::shared_ptr<OneOperation> operation) { running_.push_back(std::move(operation)); }

  /// To be called before one is kept. Looks at all of them only once there are twice as many as were left the last
  /// time: constant time for each operation.
  void tidy() {
    if (running_.size() >= tidy_at_) reap();
  }

  /// Lets go of those that are done.
  void reap() {
    const auto first_finished = std::stable_partition(running_.begin(), running_.end(),
                                                      [](const auto& operation) { return !operation->done(); });
    // Freed at the end: freeing an array can run any Python code.
    const std::vector<std::shared_ptr<OneOperation>> finished(std::make_move_iterator(first_finished),
                                                              std::make_move_iterator(running_.end()));
    running_.erase(first_finished, running_.end());
    tidy_at_ = std::max(least_, 2 * running_.size());
  }

  bool any() {
    reap();
    return !running_.empty();
  }

  /// The first that is not done; null if there is none.
  std::shared_ptr<OneOperation> next() { return any() ? running_.front() : nullptr; }

  /// Waits until all are over, with or without an error; false if they are not by `until`.
  bool finish(std::optional<Clock::time_point> until) {
    while (const auto operation = next()) {
      std::optional<std::chrono::nanoseconds> limit;
      if (until) limit = std::max<std::chrono::nanoseconds>(*until - Clock::now(), std::chrono::nanoseconds(0));
      try {
        if (!operation->wait(limit)) return false;
      } catch (const Error&) {
        // Who waits for it, or its destructor's warning, tells of it; here it only has to be over.
      }
    }
    return true;
  }

 private:
  const std::size_t least_;
  std::vector<std::shared_ptr<OneOperation>> running_;
  std::size_t tidy_at_;
};

}  // namespace cohort::python
