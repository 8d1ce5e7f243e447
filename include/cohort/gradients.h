// Options and statistics of data-parallel training, independent of the framework, and the same for C++ and Python.
// Values; any thread.
#pragma once

#include <cohort/dtype.h>
#include <cohort/observer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace at {
class Tensor;
}
namespace cohort::data {
class DistributedSampler;
}

namespace cohort::nn {

/// Treatment of gradients that are NaN or infinite.
enum class NonFinite : std::uint8_t {
  Ignore,  ///< gradients are not checked: NaN and infinities are averaged, and so reach all ranks
  Raise,   ///< every rank checks its gradients before they are reduced; backward() throws NonFiniteError on all
};

/// The part of a training's state that is divided over the ranks to save memory (ZeRO stages 1 to 3). Parameters are
/// the same to the bit as with None if the optimizer works on each element separately. Each value also divides what the
/// value before it divides.
enum class Sharding : std::uint8_t {
  None,        ///< nothing: every rank has the whole state
  Optimizer,   ///< the optimizer's state: `cohort::optim::Sharded` keeps only this rank's part of it
  Gradients,   ///< also the gradients: after a backward, no parameter has one, and the optimizer has those of its part
  Parameters,  ///< also the parameters: the ranks of a host have one copy, in memory that they share
};

struct DistributedDataParallelOptions {
  /// Size of a gradient bucket, that is of one all_reduce, in bytes (a gradient larger than this gets a bucket of its
  /// own).
  std::size_t bucket_bytes = std::size_t{25} << 20;
  /// Size of the bucket that is ready first, so that communication begins early.
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  /// Buffers (running statistics) of all ranks are overwritten with rank 0's before each synchronising forward.
  bool broadcast_buffers = true;
  /// Format of float32 gradients between hosts (AllReduceOptions::wire_format); other types travel as they are.
  WireFormat wire_format = WireFormat::None;
  /// Adds the rounding error of a step's gradients to the next step's (AllReduceOptions::residual). Default: true with
  /// Int4, which rounds coarsely, else false. Each rank keeps its own error, 4 bytes for each element of its part of
  /// the host's sum; `residuals()` returns it for a checkpoint. A rank without samples in a step adds nothing to the
  /// error, and in an elastic job a new world begins without errors. A step that is refused on all ranks, or whose
  /// averages are not finite, leaves no error for the next one. A program that skips a step for another reason calls
  /// `load_residuals({})` on all ranks. Throws InvalidArgument with formats other than Int8 and Int4.
  std::optional<bool> error_feedback = {};
  /// Raise: if any rank has a gradient that is NaN or infinite, backward() (and `step_without_samples`) throws
  /// NonFiniteError on every rank. The error names the first such value: rank, host, parameter, element, value and
  /// step. All gradients are then undefined, so that an optimizer's step changes nothing, and training can go on with
  /// the next batch. With `wire_format` on several hosts, a value that is infinite as bfloat16 counts, too. A sum of
  /// finite values that overflows is not detected, nor are gradients that are dropped because their rank has no
  /// samples. Over several hosts the check reads the gradients once; on one host it costs next to nothing
  /// (AllReduceOptions::check_finite).
  NonFinite non_finite = NonFinite::Ignore;
  /// N > 0: every N synchronised steps, a forward compares the parameters of all ranks to the bit and, with
  /// `broadcast_buffers`, the buffers too. If they differ, it throws Mismatch on every rank (see
  /// `require_same_parameters`). 0: never. Throws InvalidArgument if negative.
  std::int64_t compare_parameters_every = 0;
  /// Weights each rank's gradients by the number of samples, possibly 0, that this sampler has given the rank for its
  /// batch. The pointer is needed only at construction (a sampler is a handle). Call the sampler's `step` after each
  /// batch. Draw its batches for this model only; other data (validation) needs other samplers.
  const data::DistributedSampler* sampler = nullptr;
  /// Instead of a sampler: returns the number of samples in a forward's input tensors.
  std::function<std::int64_t(const std::vector<at::Tensor>& inputs)> samples = {};
  /// Each step's first forward compares some values of 8 parameters (all in turn) over the ranks, in a message that is
  /// sent anyway. If replicas have drifted apart by more than rounding (half of a type's digits), throws Mismatch on
  /// every rank, naming rank, parameter and value; rounding differences are logged once. Values in GPU memory are not
  /// checked, nor those of a type that was changed after wrapping. The same on all ranks.
  bool check_replicas = true;
  /// With any value but None, use a `cohort::optim::Sharded` optimizer, since nothing else gathers the ranks' parts
  /// again. Parameters then lie in memory of the communicator, none can be added or removed, and `join` is refused.
  /// With Gradients and Parameters, each gradient is divided when it is ready, and `.grad()` has no contents after a
  /// backward outside of no_sync. With Parameters, only the optimizer may write to a parameter, since every rank of the
  /// host would see the write. The next forward or step refuses parameters written in place, and names them. The same
  /// on all ranks.
  Sharding sharding = Sharding::None;
  /// For debugging, with Sharding::Parameters: the memory of parameters is write-protected except while the optimizer
  /// steps. Any other write to that memory, through a pointer too, ends the rank with SIGSEGV and a stack trace, after
  /// a line on stderr that names rank, parameter and element. Load weights before wrapping the module, or by
  /// `CheckpointFolder::load_latest(model_shards(module, &optimizer))`, which may write.
  bool protect_parameters = false;
  /// V > 0: each step's batch is divided among V virtual ranks, whatever the number of ranks, which is at most V. Each
  /// rank trains a block of them one after the other, and gradients are summed in the order of one tree over all V: so
  /// the weights have the same bits for every number of ranks (docs/reference/virtual-ranks.md). Give the sampler the
  /// same V. `step_complete()` says when the gradients are the average. 0: off. Throws InvalidArgument if negative, on
  /// more than V ranks, and together with sharding, wire_format, error_feedback, hooks, `join`, parameters on a GPU,
  /// SyncBatchNorm, and buffers without broadcast_buffers.
  std::int64_t virtual_ranks = 0;
  /// Number of threads of torch's operations on this rank, which affects the bits of some; set at construction. 0:
  /// unchanged, but the same on all ranks with virtual_ranks. Default: 1 with virtual_ranks, else 0.
  std::optional<std::int64_t> compute_threads = {};
  /// Receives each bucket that becomes ready. Not owned; must outlive the DistributedDataParallel.
  Observer* observer = nullptr;
};

/// Options of PowerSGD, with torch's names and defaults: gradients that are matrices travel as two thin ones.
struct PowerSGDOptions {
  /// Columns of the thin matrices. 1 to 4 are usual; more keeps more of the gradient.
  std::int64_t matrix_approximation_rank = 1;
  /// Number of steps at the beginning, when training is most sensitive, whose gradients are sent whole.
  std::int64_t start_powerSGD_iter = 1000;
  /// A gradient of n x m is compressed if (n + m) * rank * min_compression_rate < n * m; with more than two dimensions,
  /// n is the first. Other gradients, and types other than float32, are averaged uncompressed.
  double min_compression_rate = 2;
  /// Adds the compression error to the next step's gradient; takes the memory of one more gradient.
  bool use_error_feedback = true;
  /// True: a step begins with the previous step's matrix Q instead of a random one.
  bool warm_start = true;
  /// Added to the norms that columns are divided by; at most 1e-3.
  double orthogonalization_epsilon = 0;
  std::uint64_t random_seed = 0;  ///< has to be the same on all ranks
};

/// Statistics of the reducer. Times are of this rank.
struct ReducerStats {
  std::int64_t steps = 0;                  ///< synchronised backward passes, including those without samples
  std::int64_t non_finite_steps = 0;       ///< steps that ended in a NonFiniteError
  std::int64_t parameter_comparisons = 0;  ///< comparisons made because of compare_parameters_every
  int buckets = 0;
  std::size_t bucket_bytes = 0;              ///< total size of all buckets
  double exposed_communication_seconds = 0;  ///< of the last step: the time that the host waited after its backward had
                                             ///< ended
  double exposed_communication_seconds_total = 0;
  std::int64_t gradients_written = 0;  ///< gradients written into a bucket by assignment, in all steps
  std::int64_t gradients_moved =
      0;  ///< gradients found outside their bucket and copied in (order rebuilt, .grad replaced)
};

/// Location of a gradient in its bucket; for tests and tools.
struct BucketSlot {
  int bucket = -1;
  const void* begin = nullptr;  ///< beginning of the bucket's memory
  std::size_t bytes = 0;        ///< size of the bucket's memory
  std::size_t offset = 0;       ///< offset of the gradient in that memory
};

}  // namespace cohort::nn
