// What the machine is, and what else it does while it is measured. Reads /proc; any thread.
// Which GPU a rank measures. Belongs to the rank's thread.
#pragma once

#include <cohort/communicator.h>

#include <nlohmann/json_fwd.hpp>

#include <array>
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

/// More than this is not idle: a tenth of a core.
inline constexpr double kIdleCores = 0.1;

/// `{"event": "header", ...}`: version, host, processor, cores, load, cores that were busy for 200 ms just now.
nlohmann::json describe_machine();

struct RankGpu {
  int index = 0;                         ///< cuda:LOCAL_RANK; cuda:0 where the host's ranks are more than its GPUs
  std::array<unsigned char, 16> uuid{};  ///< tells it from all others
  std::string software;                  ///< "CUDA 12.4, 4 GPUs; NCCL 2.30.7 (PATH)", or why there is no NCCL
};

/// Throws Unavailable where this process has no driver or no GPU: what is missing.
void check_gpus();
/// Throws what `check_gpus` does.
RankGpu gpu_of(const Communicator& comm);
/// How many there are of all ranks'. All call it.
int different_gpus(Communicator& comm, const RankGpu& own);

}  // namespace cohort::app::bench
