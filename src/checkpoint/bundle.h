// What one rank brings to a checkpoint, as views of bytes that others own: they have to stay as they are until the save
// is over. Plain data.
#pragma once

#include "formats/manifest.h"
#include "formats/tensor.h"

#include <cohort/checkpoint_place.h>

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

}  // namespace cohort::checkpoint
