// Which ranks see the same folder: by the kernel that has it and the folder's number there, not by names of hosts,
// which containers share. Each place has a keeper, the lowest of its ranks: it locks the folder, makes and renames what
// is in it. Collective.
#pragma once

#include "checkpoint/bundle.h"

#include <cohort/communicator.h>

#include <cstdint>
#include <string>
#include <vector>

namespace cohort::checkpoint {

struct SharedFolder {
  CheckpointPlace place = CheckpointPlace::Rank0;
  std::vector<int> keepers;        ///< by rank, the keeper of the folder that it sees; -1: it sees none
  std::vector<std::string> hosts;  ///< by rank
  int rank = 0;

  /// Whether the path means the folder of checkpoints to this rank, and not only to rank 0.
  bool sees() const {
    return place == CheckpointPlace::Rank0 ? rank == 0 : keepers[static_cast<std::size_t>(rank)] >= 0;
  }
  bool keeps() const { return keepers[static_cast<std::size_t>(rank)] == rank; }
  int keeper_of(int of) const { return keepers[static_cast<std::size_t>(of)]; }
};

enum class IfMissing : std::uint8_t { Make, Leave };

/// For Rank0 and Shared rank 0 keeps the one folder there is. For Local, each rank looks for itself, and makes the
/// folder if it is told to; what it cannot make is everybody's error.
SharedFolder probe_shared_folder(Communicator& comm, const FolderOptions& options, IfMissing if_missing);

/// "h2 (ranks 2, 3), h3 (rank 4)": where the given ranks are.
std::string places_of(const SharedFolder& folder, const std::vector<int>& ranks);

}  // namespace cohort::checkpoint
