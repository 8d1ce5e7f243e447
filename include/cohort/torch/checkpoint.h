// Checkpoints that are complete and checked, or not there: model, optimizer, sampler position, step and epoch, and of
// every rank its random state and whatever tensors it alone has, in a folder of safetensors and JSON that needs no
// libtorch to be read (docs/reference/checkpoint-format.md). Saving and loading are collective; a save may go on in the
// background. One thread per rank calls a CheckpointFolder, whose copies are the same one. Also: weights that Python
// saved.
#pragma once

#include <cohort/checkpoint_place.h>
#include <cohort/communicator.h>
#include <cohort/early_stopping.h>
#include <cohort/shard.h>
#include <cohort/torch/data.h>
#include <cohort/torch/torch_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

namespace cohort {

/// Value that a program may add to a checkpoint: text (UTF-8), whole number, number (any double, NaN too), yes or no.
using CheckpointValue = std::variant<bool, std::int64_t, double, std::string>;
using CheckpointValues = std::map<std::string, CheckpointValue>;

/// Progress of training, apart from tensors.
struct TrainingProgress {
  std::int64_t step = 0;                           ///< optimizer steps taken
  std::int64_t epoch = 0;                          ///< epochs begun before this one
  std::optional<data::SamplerState> sampler = {};  ///< of data::DistributedSampler::state()
  CheckpointValues values = {};                    ///< the program's own: a scheduler's count, the best accuracy, ...
};

/// A checkpoint on the disk.
struct CheckpointInfo {
  std::string folder;           ///< its path, e.g. "run/checkpoints/checkpoint-000007-step-1200"
  std::int64_t generation = 0;  ///< 7: numbers grow with every save in the same folder
  int world_size = 0;           ///< ranks that saved it
  std::string created;          ///< "2026-11-21T09:00:00Z"
  TrainingProgress progress;
};

/// Tensors of one rank alone, by any name: what a data loader holds back, a shard of a table, another generator's
/// state.
using RankState = std::map<std::string, at::Tensor>;

struct CheckpointOptions {
  std::string folder;  ///< made if it does not exist
  int keep = 3;        ///< complete checkpoints to keep, at least 1; older ones go once a newer one is on the disk
  CheckpointPlace place = CheckpointPlace::Rank0;  ///< who writes, and whose disk `folder` is on; the same on all ranks
  /// For CheckpointPlace::Local: on how many hosts' disks each file is, at least 1; on all of them if there are fewer.
  /// 2: whatever one host had is also on the next one's. 1: a checkpoint is lost with any host's disk. The same on all
  /// ranks.
  int copies = 2;
  /// The checkpoints with the best number of this name among their `progress.values` stay as well, `keep_best` of them
  /// (0: 1), across restarts too: {.best_by = "valid_loss"}. One that has none, or NaN or an infinity there, is never
  /// among them; of equal ones the older is better. Empty: only `keep` counts. The same on all ranks.
  std::string best_by = {};
  int keep_best = 0;
  BestMode best_mode = BestMode::Min;
};

namespace checkpoint {
class PendingSave;
}
namespace optim {
class ShardedCore;
}

/// This rank's part of a model that no rank has all of: parts of tensors (HasShards), a stage of a pipeline, pieces of
/// an optimizer's state (optim::Sharded), or any of these at once. Tensors of one name and one Shard on several ranks
/// are replicas; the lowest rank's is saved. The layout of ranks need not be declared.
struct ModelShards {
  torch::nn::Module* module = nullptr;
  torch::optim::Optimizer* optimizer = nullptr;  ///< or nullptr; the same type and options on all ranks
  /// By name, which part of the whole tensor a parameter or buffer is; those that are not named are whole.
  std::map<std::string, Shard> tensors;
  optim::ShardedCore* sharded = nullptr;  ///< of `optimizer`, if it steps pieces
};

/// Asks the module and all below it (HasShards), and the optimizer. Both have to outlive it. Not collective.
ModelShards model_shards(torch::nn::Module& module, torch::optim::Optimizer* optimizer = nullptr);

/// A save in the background. A handle: copies mean the same save, and any thread may ask.
class CheckpointSave {
 public:
  explicit CheckpointSave(std::shared_ptr<checkpoint::PendingSave> pending) noexcept : pending_(std::move(pending)) {}
  /// True once it is over on this rank, with or without an error.
  bool done() const;
  /// Waits until the checkpoint is on the disk; throws the error of the save, which then is not thrown again by the
  /// folder.
  CheckpointInfo wait();

 private:
  std::shared_ptr<checkpoint::PendingSave> pending_;
};

/// The checkpoints of one training run:
///
///   cohort::CheckpointFolder checkpoints(comm, {.folder = "run/checkpoints"});
///   if (resume) {
///     if (auto from = checkpoints.load_latest(*net, &optimizer)) sampler.load_state(*from->progress.sampler);
///   }
///   ...  checkpoints.save_async(*net, &optimizer, {.step = step, .epoch = epoch, .sampler = sampler.state()});
///   ...  checkpoints.close();
///
/// `module` is the bare module (`DistributedDataParallel::module()`), `optimizer` one of libtorch's: SGD, Adam, AdamW,
/// Adagrad, RMSprop, LBFGS (InvalidArgument for others), or nullptr. All its parameters have to be the module's.
///
/// Errors on any rank reach every rank: all throw, disk errors (Io, Unavailable) and damage (Corrupt) included. Between
/// an error and the next save the folder holds what it held before.
class CheckpointFolder {
 public:
  /// Not collective, touches nothing. An empty communicator (`Communicator()`) stands for a world of one. Throws
  /// InvalidArgument for an empty folder's name, keep < 1, copies < 1, or a keep_best without best_by.
  CheckpointFolder(Communicator communicator, CheckpointOptions options);

  /// Saves; collective, and returns on every rank once the checkpoint is on the disk. Model, optimizer and
  /// progress are rank 0's; the random state (libtorch's default generators: the CPU's, which ranks that are threads
  /// share, and those of the GPUs that the module is on) and `state` are every rank's. A GPU's tensors are copied to
  /// the host, after what their current stream has. Written aside, synced, its digests in a manifest that comes last,
  /// then renamed: killed at any moment, it leaves the folder as it was but for a hidden remainder, which the next save
  /// removes. A save in the background ends first; its error, unless its handle has thrown it, is thrown here, and
  /// nothing is saved. Throws InvalidArgument for CheckpointPlace::Shared where some hosts see another folder: they are
  /// named. Not while ranks are in `Communicator::join`.
  CheckpointInfo save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                      const TrainingProgress& progress, const RankState& state = {});

  /// As save, but returns once everything has been copied (into the host's memory that the next save uses again: twice
  /// the state's size is needed in all, of what is on a GPU as much of the host's). The rest is done by a thread of low
  /// priority, over a communicator that the first call splits off. One save at a time: a second call waits for the
  /// first. An error is logged at once (subsystem "checkpoint"), and thrown by the handle's wait, or else by the next
  /// save, save_async, load_latest or close.
  CheckpointSave save_async(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                            const TrainingProgress& progress, const RankState& state = {});

  /// Loads the newest checkpoint that is whole; collective. Every file's digest is compared by a rank that sees it, and
  /// model and optimizer are sent to all. A damaged checkpoint is passed over with a warning (log subsystem
  /// "checkpoint") that says what is wrong, and the one before is taken. nullopt if there is none at all; throws
  /// Corrupt if there are some and all are damaged, InvalidArgument if a newer Cohort saved the newest, or if it does
  /// not fit the model (missing, unexpected and misshapen tensors are listed) or the optimizer. After these errors
  /// module, optimizer and random state are as before, on every rank. With `optimizer` nullptr its state in the
  /// checkpoint is left alone. Hyperparameters (learning rate, ...) become the saved ones. Tensors come to be on the
  /// device where the module has them, whichever they were saved from; an optimizer's on that of their parameter. Rank
  /// r gets rank r's random state and state; ranks that the saved world did not have keep their random state, and so do
  /// GPUs without one in the checkpoint. The place need not be the one it was saved with.
  std::optional<CheckpointInfo> load_latest(torch::nn::Module& module, torch::optim::Optimizer* optimizer);

  /// The same of the best by CheckpointOptions::best_by; where it is damaged, the next best. InvalidArgument if there
  /// are checkpoints and none has a finite number of this name.
  std::optional<CheckpointInfo> load_best(torch::nn::Module& module, torch::optim::Optimizer* optimizer = nullptr);
  std::optional<CheckpointInfo> load_best(const ModelShards& model);

  /// The same of a model that no rank has all of; collective. Every rank writes its parts into its own file. Names are
  /// those of the whole model, so that such a checkpoint and one of an unsharded program mean the same: each loads the
  /// other's, on any number of ranks that hold any parts. Elements that no rank has, or two have as different parts:
  /// InvalidArgument on all ranks, names the tensor; so do optimizers of different types or options. No rank needs
  /// memory for what it has not of the model; for what it has, twice that while it loads.
  CheckpointInfo save(const ModelShards& model, const TrainingProgress& progress, const RankState& state = {});
  CheckpointSave save_async(const ModelShards& model, const TrainingProgress& progress, const RankState& state = {});
  std::optional<CheckpointInfo> load_latest(const ModelShards& model);

  /// The `state` that the saved rank of this rank's number gave, in the checkpoint that load_latest has loaded; empty
  /// if that world had no such rank. On the CPU. Not collective. Throws InvalidArgument if none has been loaded.
  const RankState& rank_state() const;
  /// The same of other saved ranks, for worlds of another size: those that exist of the numbers given, by saved rank.
  /// Collective; each rank may ask for others. Throws Corrupt if a part is damaged or gone.
  std::map<int, RankState> parts(const std::set<int>& saved_ranks);
  /// The states of all saved ranks, on every rank.
  std::map<int, RankState> parts();

  /// Waits for the save in the background, and throws its error unless its handle has. Not collective. The last
  /// copy's destructor waits, too, and is silent.
  void close();

  /// The checkpoints that have a sound manifest, oldest first; files are not read, so they may yet prove damaged. Not
  /// collective, and only as good as this rank's view of the disk.
  std::vector<CheckpointInfo> list() const;

 private:
  std::optional<CheckpointInfo> load(torch::nn::Module& module, torch::optim::Optimizer* optimizer, bool best);
  std::optional<CheckpointInfo> load(const ModelShards& model, bool best);
  struct State;
  std::shared_ptr<State> state_;
};

/// Which differences between a file and a module are errors.
enum class Match : std::uint8_t {
  Strict,  ///< the file has to hold exactly the module's parameters and buffers
  Subset,  ///< names that only one side has are passed over (log subsystem "checkpoint", level info)
};

/// Which element types are converted to the module's.
enum class Convert : std::uint8_t {
  Exact,  ///< only where no value can change, as from bfloat16 to float32
  Any,    ///< rounding allowed
};

struct LoadWeightsOptions {
  Match match = Match::Strict;
  Convert convert = Convert::Exact;
  /// In a .pt whose top level is not the weights: the key that they are under ("model", "state_dict"); nested: "a/b".
  std::string key = {};
};

/// Result of load_weights.
struct LoadedWeights {
  std::vector<std::string> missing;     ///< in the module only (Match::Subset)
  std::vector<std::string> unexpected;  ///< in the file only (Match::Subset)
};

/// Copies weights from a safetensors file or a .pt of Python's `torch.save(model.state_dict(), path)`, told apart by
/// content, into the module's parameters and buffers. Names are Python's, which libtorch's modules share; a prefix
/// "module." on all of them (saved from a DistributedDataParallel) is removed. Nothing in the file is executed: of
/// pickles only tensors, numbers, text, lists, tuples and dicts are understood. Not collective. Throws Unavailable or
/// Io if the file cannot be read, Corrupt if it is damaged or holds anything else, InvalidArgument with all differences
/// (names, shapes, types) in one message if it does not fit; the module is then as before.
LoadedWeights load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options = {});

enum class WeightsFormat : std::uint8_t {
  Safetensors,
  Pt,  ///< what Python's `torch.load(path, weights_only=True)` opens: a dict of tensors
};

/// Writes parameters and buffers under their names; replaces the file as a whole. Not collective: call it on one rank.
void save_weights(const torch::nn::Module& module, const std::string& path,
                  WeightsFormat format = WeightsFormat::Safetensors);

}  // namespace cohort
