// Location of a checkpoint's files, and the ranks that write them. Plain values.
#pragma once

#include <cstdint>

namespace cohort {

enum class CheckpointPlace : std::uint8_t {
  /// All files are on rank 0's disk: other ranks send their parts there. No other rank needs to see the folder.
  Rank0,
  /// Files are in a folder that all ranks see (NFS, Lustre, one host): every rank writes and reads its own part.
  Shared,
  /// Files are in a folder of the same path on every host's own disk: the parts of that host's ranks and, in case a
  /// disk is lost, copies of another host's parts (CheckpointOptions::copies). Loading gathers the parts from the hosts
  /// that have them.
  Local,
};

}  // namespace cohort
