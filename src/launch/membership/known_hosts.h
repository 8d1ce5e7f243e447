// Hosts that an elastic job may use: those that are listed, without those that are taken away or that rest after a
// failure. Pure: the time is an argument. One thread.
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
  /// Shortest and longest time for which a host rests after failures; nullopt: for ever.
  using Cooldown = std::optional<std::pair<std::chrono::seconds, std::chrono::seconds>>;

  /// `barred`: hosts that exist and are not used until they are listed anew.
  KnownHosts(Cooldown cooldown, std::set<std::string> barred) : cooldown_(cooldown), barred_(std::move(barred)) {}

  /// Adds a host that has come by itself.
  void come(const PlannedHost& host) { listed_.push_back(host); }
  /// Sets the listed hosts; those that the user has added stay.
  void list(const std::vector<PlannedHost>& hosts);
  /// Adds a host, perhaps one that was given up before. It has this number of slots from now on.
  void add(const PlannedHost& host);
  /// Stops using the host.
  void bar(const std::string& host) { barred_.insert(host); }
  /// Stops using the host, also if the user had added it.
  void take_away(const std::string& host);
  const std::set<std::string>& barred() const noexcept { return barred_; }
  const std::vector<PlannedHost>& listed() const noexcept { return listed_; }
  /// Returns the host's number of slots; 0: it is not listed.
  int slots_of(const std::string& host) const;

  /// Makes the host rest as Horovod documents it: for the shorter time, then twice as long each time, up to the longer.
  void note_failure(const std::string& host, Time now);
  /// Returns true if the host is neither barred nor resting.
  bool may_use(const std::string& host, Time now) const;
  /// Keeps a free slot unused until the shorter time is over.
  void hold(const std::string& host, int slot, Time now);
  bool is_held(const std::string& host, int slot, Time now) const;

 private:
  struct Failures {
    int count = 0;
    std::optional<Time> free_at;  ///< nullopt: never
  };

  const Cooldown cooldown_;
  std::set<std::string> barred_;
  std::vector<PlannedHost> listed_;           ///< the hosts that exist; without a script, the hosts at the start
  std::vector<PlannedHost> added_;            ///< hosts among these that the job's user has added
  std::map<std::string, Failures> failures_;  ///< by host
  std::map<std::pair<std::string, int>, std::optional<Time>> held_;  ///< by host and slot; nullopt: for ever
};

}  // namespace cohort::launch
