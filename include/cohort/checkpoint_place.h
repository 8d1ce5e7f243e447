// Location of a checkpoint's files, and the ranks that write them. Plain values.
#pragma once

#include <cstdint>

namespace cohort {

enum class CheckpointPlace : std::uint8_t {
  /// All of them on rank 0's disk: what belongs to other ranks travels there. No other rank needs to see the folder.
  Rank0,
  /// In a folder that all ranks see (NFS, Lustre, one host): every rank writes and reads its own part.
  Shared,
  /// In a folder of the same path on every host's own disk, with the parts of that host's ranks and, so that a disk may
  /// be lost, copies of another's (CheckpointOptions::copies). Loading gathers them from whichever hosts have them.
  Local,
};

}  // namespace cohort
