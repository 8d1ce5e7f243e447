// Checkpoints that are complete and checked, or not there: model, optimizer, sampler position, random state of every
// rank, step and epoch, in a folder of safetensors and JSON that needs no libtorch to be read
// (docs/reference/checkpoint-format.md). Rank 0 alone touches the disk; saving and loading are collective. One thread
// per rank calls a CheckpointFolder, which owns nothing but a copy of the communicator's handle. Also: weights that
// Python saved.
#pragma once

#include <cohort/communicator.h>
#include <cohort/torch/data.h>
#include <cohort/torch/torch_api.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace cohort {

/// What a program may add to a checkpoint: text (UTF-8), whole numbers, numbers (any double, NaN too), yes or no.
using CheckpointValue = std::variant<bool, std::int64_t, double, std::string>;
using CheckpointValues = std::map<std::string, CheckpointValue>;

/// Where training stands, apart from tensors.
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

struct CheckpointOptions {
  std::string folder;  ///< made if it does not exist; for rank 0's eyes only, other hosts need not see it
  int keep = 3;        ///< complete checkpoints to keep, at least 1; older ones go once a newer one is on the disk
};

/// The checkpoints of one training run:
///
///   cohort::CheckpointFolder checkpoints(comm, {.folder = "run/checkpoints"});
///   if (resume) {
///     if (auto from = checkpoints.load_latest(*net, &optimizer)) sampler.load_state(*from->progress.sampler);
///   }
///   ...  checkpoints.save(*net, &optimizer, {.step = step, .epoch = epoch, .sampler = sampler.state()});
///
/// `module` is the bare module (`DistributedDataParallel::module()`), `optimizer` one of libtorch's: SGD, Adam, AdamW,
/// Adagrad, RMSprop, LBFGS (InvalidArgument for others), or nullptr. All its parameters have to be the module's.
///
/// Errors on any rank reach every rank: all throw, rank 0's disk errors (Io, Unavailable) and damage (Corrupt)
/// included. Between an error and the next save the folder holds what it held before.
class CheckpointFolder {
 public:
  /// Not collective, touches nothing. An empty communicator (`Communicator()`) stands for a world of one. Throws
  /// InvalidArgument for an empty folder's name or keep < 1.
  CheckpointFolder(Communicator communicator, CheckpointOptions options);

  /// Saves; collective, and returns on every rank once the checkpoint is on rank 0's disk. Model, optimizer and
  /// progress are rank 0's; the random state is every rank's (libtorch's default CPU generator; ranks that are threads
  /// share one). Written aside, synced, its digests in a manifest that comes last, then renamed: killed at any moment,
  /// it leaves the folder as it was but for a hidden remainder, which the next save removes. Not while ranks are in
  /// `Communicator::join`.
  CheckpointInfo save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                      const TrainingProgress& progress);

  /// Loads the newest checkpoint that is whole; collective. Rank 0 reads it, compares every file's digest and sends it
  /// to all. A damaged one is passed over with a warning (log subsystem "checkpoint") that says what is wrong, and the
  /// one before is taken. nullopt if there is none at all; throws Corrupt if there are some and all are
  /// damaged, InvalidArgument if it does not fit the model (missing, unexpected and misshapen tensors are listed) or
  /// the optimizer. After these errors module, optimizer and random state are as before, on every rank. With
  /// `optimizer` nullptr its state in the checkpoint is left alone. Hyperparameters (learning rate, ...) become the
  /// saved ones. Rank r gets rank r's random state; ranks that the saved world did not have keep theirs.
  std::optional<CheckpointInfo> load_latest(torch::nn::Module& module, torch::optim::Optimizer* optimizer);

  /// The checkpoints that have a sound manifest, oldest first; files are not read, so they may yet prove damaged. Rank
  /// 0's call alone: not collective, and on other ranks only as good as their view of the disk.
  std::vector<CheckpointInfo> list() const;

 private:
  Communicator communicator_;
  CheckpointOptions options_;
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

/// What load_weights did.
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
