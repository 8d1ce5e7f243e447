// Facts about the machine, and its other load during measurements. Reads /proc; any thread. Also the GPU that a rank
// measures, which belongs to the rank's thread.
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

/// Processor time since boot, in seconds over all cores, from the first line of /proc/stat.
struct CpuTime {
  double busy = 0;    ///< all time except idle, waiting for disks, and stolen
  double stolen = 0;  ///< time that the hypervisor gave to others
  std::chrono::steady_clock::time_point at;
};
CpuTime cpu_time();
/// Processor seconds of this process and of its ended children.
double own_cpu_seconds();

/// A machine with more busy cores than this is not idle.
inline constexpr double kIdleCores = 0.1;

/// `{"event": "header", ...}`: version, host, processor, cores, load, cores that were busy during the last 200 ms.
nlohmann::json describe_machine();

struct RankGpu {
  int index = 0;                         ///< cuda:LOCAL_RANK; cuda:0 if the host has more ranks than GPUs
  std::array<unsigned char, 16> uuid{};  ///< identifies the GPU
  std::string software;                  ///< "CUDA 12.4, 4 GPUs; NCCL 2.30.7 (PATH)", or why there is no NCCL
};

/// Throws Unavailable, naming what is missing, if this process has no driver or no GPU.
void check_gpus();
/// Returns the GPU that a rank measures. Throws what `check_gpus` throws.
RankGpu gpu_of(const Communicator& comm);
/// Number of different GPUs over all ranks. Collective.
int different_gpus(Communicator& comm, const RankGpu& own);

// The machine's limits, measured by the benchmark's own ranks: how fast all ranks together read and write memory, and
// how long a flag takes from one core to another and back. Collective.

/// Measures memory rates, and remembers them. Belongs to the rank's thread.
class MemoryRoof {
 public:
  /// Bytes per second that the slowest rank reads and writes in place, in its own buffer of `bytes` at `data`, while
  /// all ranks do so; the best of several kernels and passes. `state` is the buffer's state before. (Touched counts as
  /// hot, since the owner has the buffer in its caches.) Overwrites the buffer. 0 below 4096 bytes.
  double rate(Communicator& comm, std::byte* data, std::size_t bytes, MemoryKind kind, State state);

 private:
  std::map<std::tuple<std::size_t, MemoryKind, State>, double> known_;
};

/// Nanoseconds of a cache line's round trip between rank 0 and each of up to 8 other ranks on its host; empty if they
/// share no memory. Ranks that do not measure sleep meanwhile.
std::vector<double> flag_round_trips(Communicator& comm);

/// Numbers of streams to try. Each is a number of parts into which the buffer is cut, to be read in parallel. One
/// stream does not reach the machine's rate, since prefetchers stop at page ends and make few requests for each stream.
inline constexpr std::size_t kStreams[] = {1, 4, 8, 16};

/// Adds 1 to every float32 of `data`, in `streams` streams. Bytes beyond whole vectors of all streams do not change.
void read_and_write(void* data, std::size_t bytes, std::size_t streams);

}  // namespace cohort::app::bench
