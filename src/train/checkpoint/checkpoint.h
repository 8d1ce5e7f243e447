// One save or load of a checkpoint by all ranks. A save: parts written aside by whoever the place says, synced; digests
// to rank 0; a manifest that comes last; a rename. A load: the newest checkpoint that is whole, and its bytes to the
// ranks that need them. Who holds a file is looked up, not remembered: a checkpoint may be loaded by other ranks on
// other hosts, and from another place, than it was saved. Collective; they block, and call the communicator from the
// calling thread alone.
#pragma once

#include "base/files.h"
#include "base/records.h"
#include "train/formats/checkpoint_folder.h"
#include "train/formats/shards.h"
#include "train/formats/tensor.h"

#include <cohort/checkpoint_place.h>
#include <cohort/communicator.h>
#include <cohort/shard.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace cohort::checkpoint {

// The files of a checkpoint: docs/reference/checkpoint-format.md.
using formats::kModelFile;
using formats::kOptimizerFile;
inline constexpr const char* kRandomFile = "random.safetensors";
/// "rank-00003.safetensors".
std::string part_file(int rank);
/// In kRandomFile, of a rank's generator: "rank/3" of "cpu", "rank/3/cuda/0".
std::string random_name(int rank, const std::string& generator);
/// Prefixes of names within a part.
inline constexpr const char* kRandomPrefix = "random/";
inline constexpr const char* kStatePrefix = "state/";

/// A safetensors file to be.
struct TensorFile {
  std::string name;
  std::vector<formats::NamedTensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// A part of a tensor: of "model/fc.weight", which is where model.safetensors has "fc.weight", or "optimizer/...".
struct ShardName {
  std::string tensor;
  Shard shard;
};
void visit_fields(auto& m, auto& archive, const ShardName*) {
  archive(codec::longest(m.tensor, std::size_t{1} << 20), m.shard);
}
struct ShardBytes {
  ShardName name;
  formats::ElementType type = formats::ElementType::Float32;
  std::span<const std::byte> bytes;
};

/// One rank's contribution to a checkpoint, as views of bytes that others own; these have to stay as they are until the
/// save is over. Plain data.
struct Bundle {
  formats::Manifest manifest;     ///< step, epoch, program, sampler, values; rank 0's counts
  std::vector<TensorFile> files;  ///< what all ranks have in common; rank 0's count
  /// The states of this rank's generators: "cpu"; of the GPUs that its model is on, "cuda/0", ..., by ascending index.
  std::vector<formats::NamedTensor> random;
  std::vector<formats::NamedTensor> state;  ///< the program's tensors of this rank alone
  /// Parts of tensors of which no rank has all: one rank brings each element, and `files` have none of them.
  std::vector<ShardBytes> shards;
};

/// Which of its shards each rank is to bring where several have the same: the lowest rank. By place; collective.
std::vector<bool> without_replicas(Communicator& comm, const std::vector<ShardName>& shards);

/// A folder of checkpoints as one rank sees it.
struct FolderOptions {
  std::string path;
  int keep = 3;
  CheckpointPlace place = CheckpointPlace::Rank0;
  int copies = 2;             ///< of each file in Local, on so many hosts' disks
  formats::BestBy best = {};  ///< the same on all ranks
};
/// Throws InvalidArgument for what no folder can be.
void check(const FolderOptions& options);

/// "rank0", "shared", "local".
std::string to_string(CheckpointPlace place);

/// Which ranks see the same folder: by the kernel that has it and the folder's number there, not by names of hosts,
/// which containers share. Each place has a keeper, the lowest of its ranks: it locks the folder, makes and renames
/// what is in it. Made collectively.
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

/// Returns on every rank once the checkpoint is on the disk of everyone who keeps a part of it. What any rank cannot do
/// (write, see the folder) is an error on all of them, and the folder is as it was. So are elements of a tensor that no
/// rank brings, or two do: InvalidArgument names it. The bundle's views are not used afterwards.
formats::StoredCheckpoint save(Communicator& comm, const FolderOptions& options, const Bundle& bundle);

/// The tensors of a checkpoint, and which ranks can read what.
struct StoredTensors {
  formats::StoredCheckpoint stored;              ///< with this rank's path
  formats::CheckpointTensors content;            ///< the same on all ranks
  std::map<std::string, int> owners;             ///< by file, who has found it whole
  std::map<std::string, std::set<int>> readers;  ///< and who sees the same copy
};

/// The same on all ranks but for `part`. Where tensors are in shards, `files` and `part` are made of them.
struct Found {
  std::optional<formats::StoredCheckpoint> stored;  ///< none: no checkpoint is whole
  std::map<std::string, sys::FileBytes> files;      ///< all but parts, compared with their digests
  std::optional<sys::FileBytes> part;               ///< of the saved rank of this rank's number
  std::vector<std::string> passed_over;             ///< what is wrong with newer ones
  std::shared_ptr<const StoredTensors> tensors;     ///< if it has shards, or `unwanted` has model.safetensors
};

/// In which order checkpoints are tried; the same on all ranks.
enum class Order : std::uint8_t {
  NewestFirst,
  BestFirst,  ///< those that options.best orders; InvalidArgument where there are others only
};

/// Throws InvalidArgument if a newer Cohort saved a newer one. `unwanted` files are compared, too, but left out if no
/// rank wants them. Checkpoints of a later generation than `latest` (the same on all ranks) are not looked at.
Found load_newest(Communicator& comm, const FolderOptions& options, const std::set<std::string>& unwanted,
                  std::optional<std::int64_t> latest = {}, Order order = Order::NewestFirst);

struct WantedShard {
  ShardName name;
  std::span<std::byte> to;
};

/// Each rank gets its own parts, however they were cut when they were saved, from files that it sees, or from another
/// rank in pieces. Throws on all ranks: InvalidArgument if a tensor is not there or has other sizes; Corrupt, Io.
void read_shards(Communicator& comm, const StoredTensors& tensors, const std::vector<WantedShard>& wanted);

/// The error to throw if nothing was found although something was there; Corrupt.
Error all_damaged(const FolderOptions& options, const std::vector<std::string>& reasons);

/// Parts of saved ranks; each rank asks for those that it needs, and gets those that there are.
std::map<int, sys::FileBytes> load_parts(Communicator& comm, const FolderOptions& options,
                                         const formats::StoredCheckpoint& stored, const std::set<int>& ranks);

}  // namespace cohort::checkpoint
