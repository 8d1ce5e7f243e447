// Examines hosts for `cohort doctor`: places an agent on each in the very way that `cohort run` does, has each start a
// `cohort doctor-host` as if that were a job's rank, and asks these for what they find, of themselves and of each
// other. Hosts and pairs are asked side by side, and every wait has a deadline. Nothing is left on any host. One
// thread.
#pragma once

#include "doctor/check.h"
#include "launch/plan/plan.h"
#include "launch/start/starter.h"

#include <chrono>
#include <vector>

namespace cohort::doctor {

struct ExaminationOptions {
  std::vector<launch::HostSlots> hosts;  ///< empty: this one
  launch::RemoteOptions remote = {};
  bool all_local = false;                                            ///< every host is this one, to try
  std::chrono::milliseconds start_limit = std::chrono::seconds(10);  ///< for agents to come
  std::chrono::milliseconds whole_limit = std::chrono::seconds(24);
};

struct Examined {
  Checkup checkup;
  int signal = 0;  ///< that ended it early
};

/// Blocks signals and adopts orphans for this process: call it from one that does nothing else, before it has a second
/// thread. Throws cohort::Error where nothing can be examined.
Examined examine(const ExaminationOptions& options);

}  // namespace cohort::doctor
