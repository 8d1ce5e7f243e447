// What this host's GPUs are used for, by NVML where there is a driver. Asked on a thread of its own, since a driver may
// take its time and the agent's silence is taken for its death. Any thread.
#pragma once

#include "launch/rank_report.h"

#include <memory>
#include <vector>

namespace cohort::launch {

class GpuMeter {
 public:
  GpuMeter();
  /// Waits for a moment at most: where the driver does not answer, the thread ends by itself.
  ~GpuMeter();
  GpuMeter(const GpuMeter&) = delete;
  GpuMeter& operator=(const GpuMeter&) = delete;
  /// As it was a moment ago, by the driver's number; empty: there are none, or nothing is known yet.
  std::vector<GpuUse> use() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace cohort::launch
