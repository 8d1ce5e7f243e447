// Which hosts an elastic job may use: those that there are, those that are taken away, and those that rest after a
// failure. Pure: it takes the time. One thread.
#pragma once

#include "launch/plan/plan.h"

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

class KnownHosts {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// How long a host rests at first, and at most. Nothing: for ever.
  using Cooldown = std::optional<std::pair<std::chrono::seconds, std::chrono::seconds>>;

  /// `barred`: hosts that are not used, although they are there, until they are listed anew.
  KnownHosts(Cooldown cooldown, std::set<std::string> barred) : cooldown_(cooldown), barred_(std::move(barred)) {}

  /// There is this host, too.
  void come(const PlannedHost& host) { listed_.push_back(host); }
  /// There are these, and those that were added.
  void list(const std::vector<PlannedHost>& hosts);
  /// Adds a host, or one that was given up before again; it has so many slots from now on.
  void add(const PlannedHost& host);
  /// It is used no more.
  void bar(const std::string& host) { barred_.insert(host); }
  /// Nor listed because it was added.
  void take_away(const std::string& host);
  const std::set<std::string>& barred() const noexcept { return barred_; }
  const std::vector<PlannedHost>& listed() const noexcept { return listed_; }
  /// 0: it is not listed.
  int slots_of(const std::string& host) const;

  /// As Horovod documents it: it rests for the shorter time at first, then for twice as long, up to the longer one.
  void note_failure(const std::string& host, Time now);
  /// It is neither barred nor does it rest.
  bool may_use(const std::string& host, Time now) const;
  /// A slot is free, but not used before the shorter time is over.
  void hold(const std::string& host, int slot, Time now);
  bool is_held(const std::string& host, int slot, Time now) const;

 private:
  struct Failures {
    int count = 0;
    std::optional<Time> free_at;  ///< nothing: never
  };

  const Cooldown cooldown_;
  std::set<std::string> barred_;
  std::vector<PlannedHost> listed_;           ///< that there are; without a script those of the start
  std::vector<PlannedHost> added_;            ///< of these, by the job's user
  std::map<std::string, Failures> failures_;  ///< by host
  std::map<std::pair<std::string, int>, std::optional<Time>> held_;  ///< by host and slot; nothing: for ever
};

}  // namespace cohort::launch
