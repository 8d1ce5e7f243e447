// Ends of sends and receives. Counts those that are not over, sets the others done, reports them to the observer and in
// the rank's timeline, and calls their callbacks. Under the matcher's mutex, except `observed`, `report` and `pending`.
#pragma once

#include "comm/engine/channel.h"

#include <cohort/observer.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace cohort::comm::messages {

class MessageEnds {
 public:
  using Clock = Carrier::Clock;
  MessageEnds(const std::vector<Channels*>& kinds, const std::atomic<Observer*>& observer)
      : kinds_(kinds), observer_(observer) {}

  /// Changes the counts of works that are not over. `kind`: the channels that carry them.
  void count(Channels& kind, int works) noexcept;
  std::size_t pending() const noexcept { return pending_.load(); }
  /// Ends a work that is in no list any more.
  void complete(const std::shared_ptr<MessageWork>& work, Channels& kind, std::optional<Error> error);
  /// True if works are over and wait for `settle`. `settle` reports them, sets them done and calls their callbacks;
  /// meanwhile it unlocks the mutex.
  bool any() const noexcept { return !finished_.empty(); }
  void settle(Lock& lock);

  /// True if ended works are reported to an observer or in the rank's timeline.
  bool observed() const noexcept;
  void report(const Message& message, Clock::time_point called, Clock::time_point met, Clock::time_point ended,
              bool failed) const noexcept;

 private:
  /// Wakes threads of this rank after the end of a work.
  void wake_sleepers() noexcept;

  const std::vector<Channels*>& kinds_;
  const std::atomic<Observer*>& observer_;
  std::vector<std::shared_ptr<MessageWork>> finished_;
  std::atomic<std::size_t> pending_{0};  // written under the mutex
};

}  // namespace cohort::comm::messages
