// Measures the use of this host's GPUs through NVML, where there is a driver. Runs on its own thread, since a driver
// may be slow and a silent agent is taken for dead. Any thread.
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
