// Workers that an elastic job gets while it runs: their hosts and slots, and how far their start has come. A part of
// Membership. Pure. One thread.
#pragma once

#include "launch/membership/standing.h"

#include <optional>
#include <vector>

namespace cohort::launch {

class Newcomers {
 public:
  /// `job` outlives this.
  explicit Newcomers(Standing& job) : job_(job) {}

  /// Called when the job runs: without a script, its hosts are searched for free slots regularly.
  void begin();
  void end() noexcept { fill_at_.reset(); }
  void look();
  std::optional<Standing::Time> next_look() const;

  void fill();
  /// Takes a host that has come by itself.
  void take(const PlannedHost& host);
  /// Tells an agent that is connected or idle to start its workers.
  void start_ranks(int agent);
  int on_their_way() const;
  std::vector<int> free_slots(const PlannedHost& host) const;

 private:
  /// Starts workers in these slots, and returns their number.
  int bring(const PlannedHost& host, const std::vector<int>& slots);

  Standing& job_;
  std::optional<Standing::Time> fill_at_;
};

}  // namespace cohort::launch
