// Values that all ranks log, on their way to rank 0: each round takes those that every rank has logged by then. Rounds
// are of one thread, `add` is of any. It owns the group that it meets in.
#pragma once

#include <cohort/track.h>

#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace cohort::track {

struct SharedEntry {
  MetricLine line;
  Reduce reduce = Reduce::Mean;
};

class SharedValues {
 public:
  /// Every rank of `communicator` makes one; blocks, and throws what Communicator::group throws.
  explicit SharedValues(Communicator& communicator);

  void add(SharedEntry entry);

  enum class Wish {
    GoOn,
    End,   ///< as soon as all ranks wish it
    Leave  ///< at once
  };
  /// One meeting of all ranks: rank 0 gets what is complete. Throws Error when it cannot be; after that, and once
  /// done(), there is no other.
  std::vector<MetricLine> round(Wish wish);
  bool done() const noexcept { return done_; }
  /// What this rank has logged and no round has taken, as its own values.
  std::vector<MetricLine> take_rest();

 private:
  std::vector<MetricLine> bring(std::size_t entries);

  Communicator group_;
  bool done_ = false;
  std::string mismatch_;  ///< of rank 0, which tells the others in the next round that there is no other
  std::mutex mutex_;
  std::deque<SharedEntry> entries_;
};

}  // namespace cohort::track
