// Operations that are under way, with their arrays, whoever drops what. Each owner (Member, NamedWorld) has one. Call
// with the GIL held.
#pragma once

#include "waiting.h"

#include <cohort/error.h>

#include <algorithm>
#include <cstddef>
#include <deque>
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

  /// To be called before one is kept. Lets go of the first ones that are done, which is most of them as operations end
  /// in order; looks at all only once there are twice as many as were left the last time: constant time for each
  /// operation.
  void tidy() {
    if (running_.size() >= tidy_at_) return reap();
    const auto unfinished =
        std::find_if(running_.begin(), running_.end(), [](const auto& operation) { return !operation->done(); });
    let_go(running_.begin(), unfinished);
  }

  /// Lets go of those that are done.
  void reap() {
    const auto first_finished = std::stable_partition(running_.begin(), running_.end(),
                                                      [](const auto& operation) { return !operation->done(); });
    const auto finished = let_go(first_finished, running_.end());
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
  using All = std::deque<std::shared_ptr<OneOperation>>;

  /// Freeing what is returned can run any Python code.
  std::vector<std::shared_ptr<OneOperation>> let_go(typename All::iterator begin, typename All::iterator end) {
    std::vector<std::shared_ptr<OneOperation>> gone(std::make_move_iterator(begin), std::make_move_iterator(end));
    running_.erase(begin, end);
    return gone;
  }

  const std::size_t least_;
  All running_;
  std::size_t tidy_at_;
};

}  // namespace cohort::python
