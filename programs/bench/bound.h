// What this machine allows at best, measured by the ranks that are measured: how fast all of them read and write memory
// at once, and how long a flag takes from one core to another and back. All ranks call together.
// Reading and writing memory as fast as one core can, to learn what the machine allows. Any thread, own memory.
#pragma once

#include "bench/collective.h"

#include <cohort/communicator.h>

#include <cstddef>
#include <map>
#include <tuple>
#include <vector>

namespace cohort::app::bench {

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
