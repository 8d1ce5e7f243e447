// What one rank brings to a checkpoint, as views of bytes that others own: they have to stay as they are until the save
// is over. Plain data.
// Which ranks see the same folder: by the kernel that has it and the folder's number there, not by names of hosts,
// which containers share. Each place has a keeper, the lowest of its ranks: it locks the folder, makes and renames what
// is in it. Collective.
#pragma once

#include "train/formats/manifest.h"
#include "train/formats/tensor.h"

#include <cohort/checkpoint_place.h>
#include <cohort/communicator.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cohort::checkpoint {

// The files of a checkpoint: docs/reference/checkpoint-format.md.
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
inline constexpr const char* kRandomFile = "random.safetensors";
/// "rank-00003.safetensors".
std::string part_file(int rank);
/// In kRandomFile, of a rank's generator: "rank/3" of "cpu", "rank/3/cuda/0".
std::string random_name(int rank, const std::string& generator);
/// Of names within a part.
inline constexpr const char* kRandomPrefix = "random/";
inline constexpr const char* kStatePrefix = "state/";

/// A safetensors file to be.
struct TensorFile {
  std::string name;
  std::vector<formats::NamedTensor> tensors;
  std::map<std::string, std::string> metadata;
};

struct Bundle {
  formats::Manifest manifest;     ///< step, epoch, program, sampler, values; rank 0's counts
  std::vector<TensorFile> files;  ///< what all ranks have in common; rank 0's count
  /// The states of this rank's generators: "cpu"; of the GPUs that its model is on, "cuda/0", ..., by ascending index.
  std::vector<formats::NamedTensor> random;
  std::vector<formats::NamedTensor> state;  ///< the program's tensors of this rank alone
};

/// A folder of checkpoints as one rank sees it.
struct FolderOptions {
  std::string path;
  int keep = 3;
  CheckpointPlace place = CheckpointPlace::Rank0;
  int copies = 2;  ///< of each file in Local, on so many hosts' disks
};

/// "rank0", "shared", "local".
std::string to_string(CheckpointPlace place);

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
