// Where an elastic job may have workers: the hosts that there are, those that rest after a failure, and the places of
// each that are free. Pure: it takes the time, and knows no processes. One thread.
#pragma once

#include "launch/plan/plan.h"

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

class Places {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// How long a host rests at first, and at most. Nothing: for ever.
  using Cooldown = std::optional<std::pair<std::chrono::seconds, std::chrono::seconds>>;

  /// `barred`: hosts that are not used, although they are there, until they are listed anew; it outlives this.
  Places(Cooldown cooldown, std::set<std::string>& barred) : cooldown_(cooldown), barred_(barred) {}

  /// There is this host, too.
  void come(const PlannedHost& host) { listed_.push_back(host); }
  /// There are these, and those that were added.
  void list(const std::vector<PlannedHost>& hosts);
  /// Whatever became of it before; with so many places from now on.
  void add(const PlannedHost& host);
  /// It is used no more.
  void bar(const std::string& host) { barred_.insert(host); }
  /// Nor listed because it was added.
  void take_away(const std::string& host);
  const std::vector<PlannedHost>& listed() const noexcept { return listed_; }
  bool lists(const std::string& host) const;
  /// As Horovod documents it: it rests for the shorter time at first, then for twice as long, up to the longer one.
  void note_failure(const std::string& host, Time now);
  /// It is neither barred nor does it rest.
  bool may_use(const std::string& host, Time now) const;

  /// A worker has this place, until it ends.
  void take(int worker, const std::string& host, int local_rank) { slots_[worker] = {host, local_rank}; }
  /// All ranks that the plan has there have.
  void take_all(const PlannedHost& host);
  /// The worker's place is free, but not used before the shorter time is over.
  void hold(int worker, Time now);
  /// By local rank.
  std::vector<int> free_slots(const PlannedHost& host, const std::function<bool(int worker)>& has_ended,
                              Time now) const;

 private:
  struct Failures {
    int count = 0;
    std::optional<Time> free_at;  ///< nothing: never
  };
  using Slot = std::pair<std::string, int>;  ///< a host's name, and the local rank there

  const Cooldown cooldown_;
  std::set<std::string>& barred_;
  std::vector<PlannedHost> listed_;           ///< that there are; without a script those of the start
  std::vector<PlannedHost> added_;            ///< of these, by the job's user
  std::map<std::string, Failures> failures_;  ///< by host
  std::map<int, Slot> slots_;                 ///< by worker
  std::map<Slot, std::optional<Time>> held_;  ///< free, but not used before then; nothing: never
};

}  // namespace cohort::launch
