// What the machine is, and what else it does while it is measured. Reads /proc; any thread.
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <string>

namespace cohort::app::bench {

/// Processor time since boot, in seconds over all cores: /proc/stat's first line.
struct CpuTime {
  double busy = 0;    ///< all but idle, waiting for disks and stolen
  double stolen = 0;  ///< a hypervisor gave it to others
  std::chrono::steady_clock::time_point at;
};
CpuTime cpu_time();
/// Seconds of this process and of its children that have ended.
double own_cpu_seconds();

/// Cores that are busy now, watched for `time`.
double busy_cores(std::chrono::milliseconds time);

/// More than this is not idle: a tenth of a core.
inline constexpr double kIdleCores = 0.1;

/// `{"event": "header", ...}`: version, host, processor, cores, load, cores that were busy for 200 ms just now.
nlohmann::json describe_machine();

}  // namespace cohort::app::bench
