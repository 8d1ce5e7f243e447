// Options and statistics of data-parallel training, independent of the framework: the same for C++ and Python. Values;
// any thread.
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
  Ignore,  ///< they are not checked: they are averaged, and are on all ranks after that
  Raise,   ///< every rank checks its own before they are reduced; backward() throws NonFiniteError on all
};

/// The part of a training's state that is divided over the ranks to save memory (ZeRO stages 1 to 3). Parameters are
/// the same to the bit as with None, where the optimizer works on each element alone.
enum class Sharding : std::uint8_t {
  None,        ///< nothing: every rank has all of it
  Optimizer,   ///< the optimizer's state, which `cohort::optim::Sharded` keeps of this rank's part alone
  Gradients,   ///< and the gradients: after a backward no parameter has one, and the optimizer those of its part
  Parameters,  ///< and the parameters: the ranks of a host have one copy of them, in memory that they share
};

struct DistributedDataParallelOptions {
  /// Size of a gradient bucket, that is of one all_reduce: bytes of its gradients (one larger than this gets a bucket
  /// of its own).
  std::size_t bucket_bytes = std::size_t{25} << 20;
  /// Size of the bucket that is ready first, so that communication begins early.
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  /// Buffers (running statistics) of all ranks are overwritten with rank 0's before each synchronising forward.
  bool broadcast_buffers = true;
  /// Format of float32 gradients between hosts (AllReduceOptions::wire_format); other types travel as they are.
  WireFormat wire_format = WireFormat::None;
  /// Adds the rounding error of a step's gradients to the next step's (AllReduceOptions::residual). Not set: only with
  /// Int4, whose steps are coarse. Each rank keeps its own error, 4 bytes for each element of its part of the host's
  /// sum: `residuals()` for a checkpoint. A step in which a rank has no samples adds nothing, and in an elastic job a
  /// new world begins without. A step that is refused on all ranks, or whose averages are not finite, leaves no error
  /// for the next one. A program that skips a step for another reason calls `load_residuals({})` on all ranks. Throws
  /// InvalidArgument with formats other than Int8, Int4 and Float8E4M3.
  std::optional<bool> error_feedback = {};
  /// Raise: if any rank has a gradient that is NaN or infinite, backward() (and `step_without_samples`) throws
  /// NonFiniteError on every rank, which names the first one: rank, host, parameter, element, value and step. All
  /// gradients are undefined then, so that an optimizer's step would change nothing, and training can go on with the
  /// next batch. With `wire_format` on several hosts, a value that is infinite as bfloat16 counts, too. A sum of finite
  /// values that overflows is not detected, nor what a rank without samples yields, since it is dropped. Over several
  /// hosts it costs one reading of the gradients, on one host next to nothing (AllReduceOptions::check_finite).
  NonFinite non_finite = NonFinite::Ignore;
  /// N > 0: every N synchronised steps, a forward compares the parameters of all ranks to the bit, and the buffers too
  /// where `broadcast_buffers` makes them equal, and throws Mismatch on every rank if there is a difference: see
  /// `require_same_parameters`, which it calls. 0: never. Throws InvalidArgument if negative.
  std::int64_t compare_parameters_every = 0;
  /// Averages go by samples: by the number that this sampler has given the rank for its batch, be it 0. Needed only at
  /// construction (a sampler is a handle). Call its `step` after each batch, as where its position is to be saved. Its
  /// batches are drawn for this model alone; others (validation) have samplers of their own.
  const data::DistributedSampler* sampler = nullptr;
  /// Instead of a sampler: the number of samples in the tensors that a forward is given.
  std::function<std::int64_t(const std::vector<at::Tensor>& inputs)> samples = {};
  /// Each step compares some values of 8 parameters over the ranks, as they are at its first forward, all parameters in
  /// turn, in a message that is sent anyway. Replicas that have drifted apart by more than rounding (half of a type's
  /// digits) are a Mismatch on every rank, which names rank, parameter and value; differences of rounding are logged
  /// once. Not checked: values in a GPU's memory, and those of a type that was changed after wrapping. The same on all
  /// ranks.
  bool check_replicas = true;
  /// With anything but None, step with a `cohort::optim::Sharded` optimizer: nothing else gathers the ranks' parts
  /// again. Parameters then lie in memory of the communicator, and which ones there are is fixed; `join` is refused.
  /// With Gradients and Parameters, gradients are divided as they come, and the contents of `.grad()` are gone after a
  /// backward outside of no_sync. With Parameters, nobody writes to a parameter but the optimizer: every rank of the
  /// host would see it. The next forward or step refuses parameters written in place, and names them. The same on all
  /// ranks.
  Sharding sharding = Sharding::None;
  /// For debugging, with Sharding::Parameters: the memory of parameters is write-protected but while the optimizer
  /// steps. Any other write to it, by a pointer too, ends its rank with SIGSEGV and its stack, after a line on stderr
  /// that names rank, parameter and element. Weights are loaded before the module is wrapped, or by
  /// `CheckpointFolder::load_latest(model_shards(module, &optimizer))`, which may write.
  bool protect_parameters = false;
  /// Receives each bucket that becomes ready. Not owned; must outlive the DistributedDataParallel.
  Observer* observer = nullptr;
};

/// Options of PowerSGD, with torch's names and defaults: gradients that are matrices travel as two thin ones.
struct PowerSGDOptions {
  /// Columns of the thin matrices. 1 to 4 are usual; more keeps more of the gradient.
  std::int64_t matrix_approximation_rank = 1;
  /// Steps before it with whole gradients, since a training is most sensitive at its beginning.
  std::int64_t start_powerSGD_iter = 1000;
  /// A gradient of n x m is compressed where (n + m) * rank * min_compression_rate < n * m; of more than two
  /// dimensions, n is the first. Others, and types but float32, are averaged as they are.
  double min_compression_rate = 2;
  /// Adds the compression error to the next step's gradient; takes the memory of one more gradient.
  bool use_error_feedback = true;
  /// A step begins with the Q of the step before it instead of a random one.
  bool warm_start = true;
  /// Is added to the norms that columns are divided by; at most 1e-3.
  double orthogonalization_epsilon = 0;
  std::uint64_t random_seed = 0;  ///< the same on all ranks
};

/// Statistics of the reducer. Times are of this rank.
struct ReducerStats {
  std::int64_t steps = 0;                  ///< synchronised backward passes, with those without samples
  std::int64_t non_finite_steps = 0;       ///< of these, the ones that ended in a NonFiniteError
  std::int64_t parameter_comparisons = 0;  ///< done because of compare_parameters_every
  int buckets = 0;
  std::size_t bucket_bytes = 0;              ///< of all buckets together
  double exposed_communication_seconds = 0;  ///< of the last step: the host's waiting after its backward had ended
  double exposed_communication_seconds_total = 0;
  std::int64_t gradients_written = 0;  ///< gradients written into a bucket by assignment, in all steps
  std::int64_t gradients_moved =
      0;  ///< gradients found outside their bucket and copied in (order rebuilt, .grad replaced)
};

/// Location of a gradient in its bucket; for tests and tools.
struct BucketSlot {
  int bucket = -1;
  const void* begin = nullptr;  ///< of the bucket's memory
  std::size_t bytes = 0;        ///< of the bucket's memory
  std::size_t offset = 0;       ///< of the gradient in it
};

}  // namespace cohort::nn
