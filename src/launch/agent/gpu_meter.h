// Measures the use of this host's GPUs through NVML, if there is a driver. Runs on its own thread, since a driver may
// be slow and a silent agent counts as dead. Any thread.
#pragma once

#include "launch/rank_report.h"

#include <memory>
#include <vector>

namespace cohort::launch {

class GpuMeter {
 public:
  GpuMeter();
  /// Waits only for a moment: if the driver does not answer, the thread ends later by itself.
  ~GpuMeter();
  GpuMeter(const GpuMeter&) = delete;
  GpuMeter& operator=(const GpuMeter&) = delete;
  /// Returns the latest measurement, by the driver's GPU number; empty: no GPUs, or no measurement yet.
  std::vector<GpuUse> use() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace cohort::launch
