// Workers that an elastic job gets while it runs: on which hosts, in which slots, and how far they have come. A part of
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

  /// The job runs: without a script its hosts are looked through for free slots again and again.
  void begin();
  void end() noexcept { fill_at_.reset(); }
  void look();
  std::optional<Standing::Time> next_look() const;

  void fill();
  /// One has come by itself.
  void take(const PlannedHost& host);
  /// An agent is connected, or idle, and is to have workers.
  void start_ranks(int agent);
  int on_their_way() const;
  std::vector<int> free_slots(const PlannedHost& host) const;

 private:
  /// Returns how many.
  int bring(const PlannedHost& host, const std::vector<int>& slots);

  Standing& job_;
  std::optional<Standing::Time> fill_at_;
};

}  // namespace cohort::launch
