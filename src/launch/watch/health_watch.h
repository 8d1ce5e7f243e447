// Looks after a running job once a second: keeps what ranks report, has Health judge it, and tells what follows.
// Belongs to the supervisor and its thread; knows neither agents nor the display.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/watch/health.h"
#include "launch/watch/step_watch.h"

#include <functional>
#include <string>
#include <vector>

namespace cohort::launch {

struct WatchLimits {
  HealthLimits health = {};
  StepLimits steps = {};
};

class HealthWatch {
 public:
  struct Events {
    /// Something that a person should be told.
    std::function<void(const std::string&)> say;
    std::function<void(Warning)> warn;
    /// The job has to end, and why. Called once, after an overview has been said.
    std::function<void(const std::string&)> on_stuck;
  };
  /// `hosts`: of each process.
  HealthWatch(Loop& loop, std::vector<std::string> hosts, const Roles& roles, const WatchLimits& limits, Events events);

  /// All ranks run: from now on until `stop`.
  void start() { look(); }
  void stop();
  /// Of the agent of these processes.
  void take(Reports reports, const std::vector<int>& processes);
  /// `last`: what it was doing then.
  void rank_ended(const RankReport& last);
  void started_again(int process) { health_.began_anew(process, Health::Clock::now()); }
  void host_ended(const std::vector<int>& processes) { health_.host_ended(processes); }
  /// Says what every rank is doing, once the reports that agents have been asked for now have come. False: that is
  /// under way already, and nobody need be asked.
  bool show_soon();
  /// A rank saves and ends when a signal asks it to.
  bool somebody_saves() const { return health_.somebody_saves(); }
  bool somebody_leaves() const { return health_.somebody_leaves(); }
  std::vector<std::string> doing_now() const { return health_.doing_now(); }

 private:
  void look();
  void show();

  Loop& loop_;
  Roles roles_;
  Health health_;
  StepWatch steps_;
  Events events_;
  Timer look_;
  Timer show_;
};

}  // namespace cohort::launch
