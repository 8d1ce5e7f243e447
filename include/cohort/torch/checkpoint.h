// Checkpoints that are complete and checked, or absent: model, optimizer, sampler position, step and epoch, and every
// rank's random state and own tensors, in a folder of safetensors and JSON, which can be read without libtorch
// (docs/reference/checkpoint-format.md). Saving and loading are collective; a save may run in the background. A
// CheckpointFolder is a handle, called by one thread per rank. Also loads weights that Python saved.
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

/// Value that a program may add to a checkpoint: text (UTF-8), whole number, number (any double, NaN too), true or
/// false.
using CheckpointValue = std::variant<bool, std::int64_t, double, std::string>;
using CheckpointValues = std::map<std::string, CheckpointValue>;

/// Progress of training, apart from tensors.
struct TrainingProgress {
  std::int64_t step = 0;                           ///< optimizer steps taken
  std::int64_t epoch = 0;                          ///< epochs begun before this one
  std::optional<data::SamplerState> sampler = {};  ///< result of data::DistributedSampler::state()
  CheckpointValues values = {};                    ///< the program's own: a scheduler's count, the best accuracy, ...
};

/// A checkpoint on the disk.
struct CheckpointInfo {
  std::string folder;           ///< the checkpoint's path, e.g. "run/checkpoints/checkpoint-000007-step-1200"
  std::int64_t generation = 0;  ///< 7: numbers grow with every save in the same folder
  int world_size = 0;           ///< ranks that saved it
  std::string created;          ///< "2026-11-21T09:00:00Z"
  TrainingProgress progress;
};

/// Tensors that belong to one rank, under any names: a data loader's buffered samples, a shard of a table, another
/// generator's state.
using RankState = std::map<std::string, at::Tensor>;

struct CheckpointOptions {
  std::string folder;  ///< created if missing
  int keep = 3;        ///< complete checkpoints to keep, at least 1; older ones are deleted when a newer one is on the
                       ///< disk
  CheckpointPlace place = CheckpointPlace::Rank0;  ///< which ranks write, and on which disk `folder` is; the same on
                                                   ///< all ranks
  /// For CheckpointPlace::Local: number of hosts that keep each file on their disks, at least 1; all hosts if there are
  /// fewer. 2: each host's files are also on the next host's disk. 1: losing any host's disk loses the checkpoint. The
  /// same on all ranks.
  int copies = 2;
  /// Name of a number in `progress.values`, as in {.best_by = "valid_loss"}: the best `keep_best` checkpoints by that
  /// number (0 means 1) are kept as well, also across restarts. A checkpoint without that number, or with NaN or an
  /// infinity, is never among the best; of equal checkpoints the older is better. Empty: only `keep` counts. The same
  /// on all ranks.
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

/// This rank's part of a model that no rank holds whole: parts of tensors (HasShards), a stage of a pipeline, pieces of
/// an optimizer's state (optim::Sharded), or any of these at once. Tensors of one name and one Shard on several ranks
/// are replicas; the lowest rank's is saved. The layout of ranks need not be declared.
struct ModelShards {
  torch::nn::Module* module = nullptr;
  torch::optim::Optimizer* optimizer = nullptr;  ///< nullptr: none; has the same type and options on all ranks
  /// By name of a parameter or buffer: the part of it that this rank holds. Others are held whole.
  std::map<std::string, Shard> tensors;
  optim::ShardedCore* sharded = nullptr;  ///< set if `optimizer` steps pieces
};

/// Describes the parts of the module, with its submodules (HasShards), and of the optimizer. Both have to outlive the
/// result. Not collective.
ModelShards model_shards(torch::nn::Module& module, torch::optim::Optimizer* optimizer = nullptr);

/// A save in the background. A handle: copies mean the same save, and any thread may call it.
class CheckpointSave {
 public:
  explicit CheckpointSave(std::shared_ptr<checkpoint::PendingSave> pending) noexcept : pending_(std::move(pending)) {}
  /// True if the save has ended on this rank, with or without an error.
  bool done() const;
  /// Waits until the checkpoint is on the disk; throws the save's error, which the folder then does not throw again.
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
/// Errors on any rank reach every rank: all throw, also for disk errors (Io, Unavailable) and damage (Corrupt). After
/// an error, until the next save, the folder holds what it held before.
class CheckpointFolder {
 public:
  /// Not collective; does not touch the disk. An empty communicator (`Communicator()`) stands for a world of one.
  /// Throws InvalidArgument for an empty folder's name, keep < 1, copies < 1, or a keep_best without best_by.
  CheckpointFolder(Communicator communicator, CheckpointOptions options);

  /// Saves; collective, and returns on every rank once the checkpoint is on the disk. Model, optimizer and progress are
  /// rank 0's; the random state (libtorch's default generators: the CPU's, which ranks that are threads share, and
  /// those of the GPUs that the module is on) and `state` are each rank's own. A GPU's tensors are copied to the host
  /// after the work in their current stream. The checkpoint is written under a hidden name and synced, with the
  /// manifest of digests last, then renamed: if the program is killed at any moment, the folder is as it was, except
  /// for a hidden remainder that the next save removes. Waits for a save in the background first; if that failed and
  /// its handle has not thrown the error, throws it, and saves nothing. Throws InvalidArgument, naming the hosts, if
  /// with CheckpointPlace::Shared some hosts see another folder. Not to be called while ranks are in
  /// `Communicator::join`.
  CheckpointInfo save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                      const TrainingProgress& progress, const RankState& state = {});

  /// Like save, but returns as soon as everything has been copied (into host memory as large as the state, GPU tensors
  /// included, which the next save reuses). A thread of low priority does the rest, over a communicator that the first
  /// call splits off. One save runs at a time: a second call waits for the first. An error is logged immediately
  /// (subsystem "checkpoint"), and thrown by the handle's wait, or else by the next save, save_async, load_latest or
  /// close.
  CheckpointSave save_async(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                            const TrainingProgress& progress, const RankState& state = {});

  /// Loads the newest checkpoint that is whole; collective. Each rank that sees a file checks the file's digest; model
  /// and optimizer are sent to all ranks. A damaged checkpoint is skipped with a warning (log subsystem "checkpoint")
  /// that says what is wrong, and the one before is taken. Returns nullopt if there is no checkpoint; throws Corrupt if
  /// all existing ones are damaged, InvalidArgument if a newer Cohort saved the newest one, or if that one does not fit
  /// the model (missing, unexpected and misshapen tensors are listed) or the optimizer. After these errors module,
  /// optimizer and random state are as before, on every rank. With `optimizer` nullptr the optimizer's state in the
  /// checkpoint is ignored. Hyperparameters (learning rate, ...) become the saved ones. Tensors are loaded to the
  /// module's devices, wherever they were saved from; an optimizer's tensors to the device of their parameter. Rank r
  /// gets rank r's random state and `state`; ranks that the saved world did not have keep their random state, and so do
  /// GPUs without one in the checkpoint. CheckpointOptions::place may differ from the save's.
  std::optional<CheckpointInfo> load_latest(torch::nn::Module& module, torch::optim::Optimizer* optimizer);

  /// Like load_latest, for the best checkpoint by CheckpointOptions::best_by; if that is damaged, the next best. Throws
  /// InvalidArgument if there are checkpoints and none has a finite number of this name.
  std::optional<CheckpointInfo> load_best(torch::nn::Module& module, torch::optim::Optimizer* optimizer = nullptr);
  std::optional<CheckpointInfo> load_best(const ModelShards& model);

  /// Saves and loads a model that no rank holds whole; collective. Every rank writes its parts into its own file. Names
  /// are those of the whole model, so that sharded and unsharded programs load each other's checkpoints, on any number
  /// of ranks that hold any parts. Throws InvalidArgument on all ranks, naming the tensor, if an element is on no rank,
  /// or on two ranks in different parts; also for optimizers of different types or options. A rank needs memory for its
  /// parts only; while loading, twice that.
  CheckpointInfo save(const ModelShards& model, const TrainingProgress& progress, const RankState& state = {});
  CheckpointSave save_async(const ModelShards& model, const TrainingProgress& progress, const RankState& state = {});
  std::optional<CheckpointInfo> load_latest(const ModelShards& model);

  /// The `state` that the rank with this rank's number saved in the checkpoint that load_latest has loaded; empty if
  /// that world had no such rank. On the CPU. Not collective. Throws InvalidArgument if no checkpoint has been loaded.
  const RankState& rank_state() const;
  /// The states of the given saved ranks, if they existed, for worlds of another size. Collective; each rank may ask
  /// for other saved ranks. Throws Corrupt if a part is damaged or missing.
  std::map<int, RankState> parts(const std::set<int>& saved_ranks);
  /// The states of all saved ranks, on every rank.
  std::map<int, RankState> parts();

  /// Waits for the save in the background, and throws its error unless the save's handle has thrown it. Not collective.
  /// The last copy's destructor waits, too, without throwing.
  void close();

  /// The checkpoints that have a sound manifest, oldest first; files are not read, so they may still be damaged. Not
  /// collective: shows this rank's view of the disk.
  std::vector<CheckpointInfo> list() const;

 private:
  std::optional<CheckpointInfo> load(torch::nn::Module& module, torch::optim::Optimizer* optimizer, bool best);
  std::optional<CheckpointInfo> load(const ModelShards& model, bool best);
  struct State;
  std::shared_ptr<State> state_;
};

/// Selects which differences between a file and a module are errors.
enum class Match : std::uint8_t {
  Strict,  ///< the file has to contain exactly the module's parameters and buffers
  Subset,  ///< names that only one side has are skipped (log subsystem "checkpoint", level info)
};

/// Selects which element types are converted to the module's.
enum class Convert : std::uint8_t {
  Exact,  ///< only where no value can change, as from bfloat16 to float32
  Any,    ///< rounding allowed
};

struct LoadWeightsOptions {
  Match match = Match::Strict;
  Convert convert = Convert::Exact;
  /// For a .pt whose top level is not the weights: the key of the weights ("model", "state_dict"); nested: "a/b".
  std::string key = {};
};

/// Result of load_weights.
struct LoadedWeights {
  std::vector<std::string> missing;     ///< in the module only (Match::Subset)
  std::vector<std::string> unexpected;  ///< in the file only (Match::Subset)
};

/// Copies weights from a safetensors file or a .pt of Python's `torch.save(model.state_dict(), path)`, told apart by
/// content, into the module's parameters and buffers. Names are Python's, which libtorch's modules share; a prefix
/// "module." on all of them (saved from a DistributedDataParallel) is removed. Nothing in the file is executed: pickles
/// may contain only tensors, numbers, text, lists, tuples and dicts. Not collective. Throws Unavailable or Io if the
/// file cannot be read, Corrupt if it is damaged or contains anything else, InvalidArgument with all differences
/// (names, shapes, types) in one message if the weights do not fit; the module is then unchanged.
LoadedWeights load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options = {});

enum class WeightsFormat : std::uint8_t {
  Safetensors,
  Pt,  ///< a dict of tensors, which Python's `torch.load(path, weights_only=True)` opens
};

/// Writes parameters and buffers under their names; replaces the file as a whole. Not collective: call it on one rank.
void save_weights(const torch::nn::Module& module, const std::string& path,
                  WeightsFormat format = WeightsFormat::Safetensors);

}  // namespace cohort
