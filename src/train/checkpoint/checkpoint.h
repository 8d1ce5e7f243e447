// One save or load of a checkpoint by all ranks. In a save, the ranks that the place selects write and sync parts in a
// hidden folder, and send digests to rank 0; the manifest is written last, and the folder is renamed. A load finds the
// newest checkpoint that is whole, and sends its bytes to the ranks that need them. Each load looks up which rank sees
// a file, since other ranks on other hosts than in the save may load the checkpoint, also from another place. All
// functions are collective and block, and call the communicator only from the calling thread.
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
/// Returns "rank-00003.safetensors".
std::string part_file(int rank);
/// Returns the name of a rank's generator in kRandomFile: "rank/3" for "cpu", "rank/3/cuda/0" for "cuda/0".
std::string random_name(int rank, const std::string& generator);
/// Prefixes of names within a part.
inline constexpr const char* kRandomPrefix = "random/";
inline constexpr const char* kStatePrefix = "state/";

/// A safetensors file to be written.
struct TensorFile {
  std::string name;
  std::vector<formats::NamedTensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// A part of a tensor: "model/fc.weight" is the tensor "fc.weight" of model.safetensors; also "optimizer/...".
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

/// One rank's contribution to a checkpoint, as views of bytes that must not change until the save is over. Plain data.
struct Bundle {
  formats::Manifest manifest;     ///< step, epoch, program, sampler, values; only rank 0's is used
  std::vector<TensorFile> files;  ///< files common to all ranks; only rank 0's are used
  /// The states of this rank's generators: "cpu", then "cuda/0", ... for the GPUs that its model is on, in this order.
  std::vector<formats::NamedTensor> random;
  std::vector<formats::NamedTensor> state;  ///< the program's tensors that only this rank has
  /// Parts of tensors that no rank has in full: exactly one rank passes each element, and `files` contain none of them.
  std::vector<ShardBytes> shards;
};

/// Returns, for each of this rank's shards, whether this rank saves it. The lowest rank saves equal shards. Collective.
std::vector<bool> without_replicas(Communicator& comm, const std::vector<ShardName>& shards);

/// A folder of checkpoints as one rank sees it.
struct FolderOptions {
  std::string path;
  int keep = 3;
  CheckpointPlace place = CheckpointPlace::Rank0;
  int copies = 2;             ///< for Local: number of hosts that have each file on their disks
  formats::BestBy best = {};  ///< the same on all ranks
};
/// Throws InvalidArgument for options that no folder can have.
void check(const FolderOptions& options);

/// Returns "rank0", "shared" or "local".
std::string to_string(CheckpointPlace place);

/// Records which ranks see the same folder, by the kernel's boot id and the folder's inode, not by host names, which
/// containers share. The keeper of a folder is the lowest rank that sees it: the keeper locks the folder, and makes and
/// renames its contents. Made collectively.
struct SharedFolder {
  CheckpointPlace place = CheckpointPlace::Rank0;
  std::vector<int> keepers;        ///< by rank: the keeper of the folder that the rank sees; -1 if it sees none
  std::vector<std::string> hosts;  ///< by rank
  int rank = 0;

  /// Returns whether this rank sees the folder of checkpoints at the path.
  bool sees() const {
    return place == CheckpointPlace::Rank0 ? rank == 0 : keepers[static_cast<std::size_t>(rank)] >= 0;
  }
  bool keeps() const { return keepers[static_cast<std::size_t>(rank)] == rank; }
  int keeper_of(int of) const { return keepers[static_cast<std::size_t>(of)]; }
};

enum class IfMissing : std::uint8_t { Make, Leave };

/// For Rank0 and Shared, rank 0 is the keeper of the one folder. For Local, each rank looks for its folder, and makes
/// it if `if_missing` says so; a failure is an error on all ranks.
SharedFolder probe_shared_folder(Communicator& comm, const FolderOptions& options, IfMissing if_missing);

/// Returns the hosts of the given ranks: "h2 (ranks 2, 3), h3 (rank 4)".
std::string places_of(const SharedFolder& folder, const std::vector<int>& ranks);

/// Returns on every rank once all keepers of a part have the checkpoint on their disks. If a rank fails (to write, to
/// see the folder), all ranks get an error, and the folder is unchanged. If no rank or two ranks pass an element,
/// InvalidArgument names its tensor. The bundle's views are not used afterwards.
formats::StoredCheckpoint save(Communicator& comm, const FolderOptions& options, const Bundle& bundle);

/// The tensors of a checkpoint, and the ranks that can read their files.
struct StoredTensors {
  formats::StoredCheckpoint stored;              ///< the checkpoint, with this rank's path
  formats::CheckpointTensors content;            ///< the same on all ranks
  std::map<std::string, int> owners;             ///< by file, the rank that has found it whole
  std::map<std::string, std::set<int>> readers;  ///< by file, the ranks that see the same copy
};

/// The result of a load, the same on all ranks except for `part`. `files` and `part` are assembled if there are shards.
struct Found {
  std::optional<formats::StoredCheckpoint> stored;  ///< nullopt: no checkpoint is whole
  std::map<std::string, sys::FileBytes> files;      ///< all but parts, compared with their digests
  std::optional<sys::FileBytes> part;               ///< part of the saved rank with this rank's number
  std::vector<std::string> passed_over;             ///< problems of newer, damaged checkpoints, which were skipped
  std::shared_ptr<const StoredTensors> tensors;     ///< set if there are shards, or `unwanted` has model.safetensors
};

/// Order in which checkpoints are tried; the same on all ranks.
enum class Order : std::uint8_t {
  NewestFirst,
  BestFirst,  ///< best first, by options.best; InvalidArgument if no checkpoint has the value
};

/// Throws InvalidArgument if a newer Cohort saved a newer checkpoint. Files that are `unwanted` on all ranks are
/// compared but not returned. Ignores generations later than `latest`, which is the same on all ranks.
Found load_newest(Communicator& comm, const FolderOptions& options, const std::set<std::string>& unwanted,
                  std::optional<std::int64_t> latest = {}, Order order = Order::NewestFirst);

struct WantedShard {
  ShardName name;
  std::span<std::byte> to;
};

/// Reads each rank's parts, however the tensors were divided when saved, from files that the rank sees or in pieces
/// from another rank. Throws on all ranks: InvalidArgument if a tensor is missing or has other sizes; Corrupt; Io.
void read_shards(Communicator& comm, const StoredTensors& tensors, const std::vector<WantedShard>& wanted);

/// Returns the error, Corrupt, to throw if checkpoints exist but none is whole.
Error all_damaged(const FolderOptions& options, const std::vector<std::string>& reasons);

/// Loads parts of saved ranks: each rank passes the saved ranks whose parts it needs, and gets the parts that exist.
std::map<int, sys::FileBytes> load_parts(Communicator& comm, const FolderOptions& options,
                                         const formats::StoredCheckpoint& stored, const std::set<int>& ranks);

}  // namespace cohort::checkpoint
