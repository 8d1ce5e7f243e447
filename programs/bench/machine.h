// Facts about the machine, and its other load while it is measured. Reads /proc; any thread.
// The GPU that a rank measures. Belongs to the rank's thread.
#pragma once

#include "bench/collective.h"

#include <cohort/communicator.h>

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <vector>

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
/// Number of different GPUs of all ranks. All ranks call it.
int different_gpus(Communicator& comm, const RankGpu& own);

// The machine's limits, measured by the benchmark's own ranks: how fast all of them read and write memory at once, and
// how long a flag takes from one core to another and back. All ranks call together.

/// Remembers what it has measured. Belongs to the rank's thread.
class MemoryRoof {
 public:
  /// Bytes per second that one rank reads and writes, in place, in a buffer of its own of `bytes` at `data`, while all
  /// ranks do so, by the best of several kernels and passes: the slowest rank's. The buffer is in the state that
  /// `state` says before (touched is hot here: its owner has it in its caches). Overwrites the buffer. 0 below 4096
  /// bytes.
  double rate(Communicator& comm, std::byte* data, std::size_t bytes, MemoryKind kind, State state);

 private:
  std::map<std::tuple<std::size_t, MemoryKind, State>, double> known_;
};

/// Nanoseconds of a cache line there and back between rank 0 and each other rank on its host, of up to 8; empty where
/// they share no memory. Meanwhile the ranks that do not take part sleep.
std::vector<double> flag_round_trips(Communicator& comm);

/// The ways that are tried: into how many streams the buffer is cut, which are walked side by side. One stream does not
/// reach the machine's rate: prefetchers stop at page ends and follow each stream with few requests.
inline constexpr std::size_t kStreams[] = {1, 4, 8, 16};

/// Adds 1 to every float32 of `data`, in as many streams. Bytes beyond whole vectors of all streams are left alone.
void read_and_write(void* data, std::size_t bytes, std::size_t streams);

}  // namespace cohort::app::bench
