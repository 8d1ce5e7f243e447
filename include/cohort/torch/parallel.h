// Layers that are divided over the ranks (tensor parallelism, as in Megatron), and a batch normalization over all
// ranks' batches. The ranks of `comm`, typically `mesh.along("tp")`, call forward together, with the same input unless
// an option says that the input is split, and compute the same loss, which counts once. Results are those of one
// process except for the order of sums (partial sums are folded by ascending rank). One thread per rank.
//
//   cohort::Communicator tp = mesh.along("tp");
//   nn::ColumnParallelLinear up(tp, nn::ColumnParallelLinearOptions{.in_features = 512, .out_features = 2048});
//   nn::RowParallelLinear down(tp, nn::RowParallelLinearOptions{.in_features = 2048, .out_features = 512});
//   y = down(at::gelu(up(x)));    // one all_reduce in the forward, one in the backward
//   nn::replicate(tp, *model);    // once it is made: parameters that the layers above do not cut become the same
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>
#include <cohort/shard.h>

#include <torch/nn/options/batchnorm.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace cohort::nn {

/// A module that holds only a part of some parameters on this rank. Checkpoints and optimizers look for it (by
/// dynamic_cast) in each module of a model's tree.
class HasShards {
 public:
  virtual ~HasShards() = default;
  /// Parts by the names of the module's own parameters, without its children's. A parameter that is not listed is held
  /// whole.
  virtual std::map<std::string, Shard> shards() const = 0;
};

// Construction is collective: it throws Mismatch on all ranks if they give different sizes, and InvalidArgument if the
// size to be divided is no multiple of the number of ranks. Each rank draws the whole weight, with the distribution of
// torch's layer, from a generator whose seed rank 0 has drawn, and keeps its part, so that a model begins with the same
// weights on any number of ranks if rank 0's generator had the same seed. All ranks draw a seed, so generators that are
// in step stay so.
//
// Sequence parallelism: with `sequence_dim`, activations between a row-parallel (or embedding) layer and the next
// column-parallel one are cut along that dimension, and each rank holds and computes its part; an all_gather and a
// reduce_scatter replace each all_reduce. Modules in between, such as LayerNorm, have whole parameters, but each rank
// computes only a part of their gradient: see `sum_gradients`.

// In training, a layer's first and each 64th forward compare some values that have to be the same on all ranks (of a
// whole input or bias). A difference throws Mismatch on all ranks, before their models have drifted far apart.

enum class Features : std::uint8_t {
  Whole,  ///< all of the last dimension, on all ranks
  Split,  ///< this rank's part of the last dimension
};

struct ColumnParallelLinearOptions {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  bool bias = true;
  Features output = Features::Split;
  std::optional<std::int64_t> sequence_dim = {};  ///< the input is split along it
  at::Generator generator = {};                   ///< generator of the seed; undefined: the process's own
};

/// A linear layer cut by its outputs: `weight` is [out_features / size, in_features], `bias` [out_features / size].
class ColumnParallelLinearImpl : public torch::nn::Module, public HasShards {
 public:
  ColumnParallelLinearImpl(Communicator comm, const ColumnParallelLinearOptions& options);
  /// [..., in_features] to [..., out_features / size], or as `options.output` says.
  at::Tensor forward(const at::Tensor& x);
  std::map<std::string, Shard> shards() const override;
  at::Tensor weight, bias;

 private:
  Communicator comm_;
  ColumnParallelLinearOptions options_;
  std::int64_t forwards_ = 0;  // in training
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  bool bias = true;
  Features input = Features::Split;
  std::optional<std::int64_t> sequence_dim = {};  ///< the output is split along it
  at::Generator generator = {};                   ///< as in ColumnParallelLinearOptions
};

/// A linear layer cut by its inputs: `weight` is [out_features, in_features / size], `bias` [out_features], whole.
class RowParallelLinearImpl : public torch::nn::Module, public HasShards {
 public:
  RowParallelLinearImpl(Communicator comm, const RowParallelLinearOptions& options);
  /// [..., in_features / size], or as `options.input` says, to [..., out_features]. The bias is added after the sum.
  at::Tensor forward(const at::Tensor& x);
  std::map<std::string, Shard> shards() const override;
  at::Tensor weight, bias;

 private:
  Communicator comm_;
  RowParallelLinearOptions options_;
  std::int64_t forwards_ = 0;  // in training
};
TORCH_MODULE(RowParallelLinear);

struct VocabParallelEmbeddingOptions {
  std::int64_t num_embeddings = 0;  ///< a multiple of the number of ranks: round a vocabulary up
  std::int64_t embedding_dim = 0;
  std::optional<std::int64_t> sequence_dim = {};  ///< the output is split along it
  at::Generator generator = {};                   ///< as in ColumnParallelLinearOptions
};

/// An embedding that is cut by its rows: `weight` is [num_embeddings / size, embedding_dim].
class VocabParallelEmbeddingImpl : public torch::nn::Module, public HasShards {
 public:
  VocabParallelEmbeddingImpl(Communicator comm, const VocabParallelEmbeddingOptions& options);
  /// Indices [...] to [..., embedding_dim]. An index that is not in the vocabulary fails as in torch's embedding.
  at::Tensor forward(const at::Tensor& indices);
  std::map<std::string, Shard> shards() const override;
  at::Tensor weight;

 private:
  Communicator comm_;
  VocabParallelEmbeddingOptions options_;
};
TORCH_MODULE(VocabParallelEmbedding);

struct ParallelCrossEntropyOptions {
  at::Reduction::Reduction reduction = at::Reduction::Mean;  ///< Mean (over the targets that are not ignored), Sum, or
                                                             ///< None
  std::int64_t ignore_index = -100;
};

/// torch's cross_entropy of logits that are split over the vocabulary, as ColumnParallelLinear gives them, without
/// gathering them. Costs two all_reduces, of one and two values per target.
class ParallelCrossEntropyImpl : public torch::nn::Module {
 public:
  explicit ParallelCrossEntropyImpl(Communicator comm, const ParallelCrossEntropyOptions& options = {});
  /// Takes logits [..., vocabulary / size] and targets [...], the same on all ranks; returns the loss, a scalar or
  /// [...]. With 16-bit logits, the loss is computed and returned in float32.
  at::Tensor forward(const at::Tensor& logits, const at::Tensor& targets);

 private:
  Communicator comm_;
  ParallelCrossEntropyOptions options_;
};
TORCH_MODULE(ParallelCrossEntropy);

/// Makes the undivided parts of `module` the same on all ranks of `comm`: parameters and buffers outside every
/// HasShards become rank 0's. So do the states of libtorch's default generators, the CPU's and those of the GPUs that
/// the module is on. Then a plain dropout of a whole activation draws the same mask on all ranks, as long as all make
/// the same draws. Collective; call it after construction or a manual load, before the module is wrapped. Throws
/// Mismatch on all ranks if names or shapes of parameters differ.
void replicate(Communicator& comm, torch::nn::Module& module);

struct ParallelDropoutOptions {
  double p = 0.5;
  at::Generator generator = {};  ///< a CPU generator, in step on all ranks; undefined: the process's own
};

/// Dropout of activations that are divided over the ranks, between a column-parallel and a row-parallel layer or along
/// `sequence_dim`: each rank has its own mask. (torch's Dropout, with generators in step, would draw the same mask for
/// every part.) All ranks draw one number from the generator, so that generators stay in step; the number and the rank
/// determine the mask.
class ParallelDropoutImpl : public torch::nn::Module {
 public:
  explicit ParallelDropoutImpl(Communicator comm, const ParallelDropoutOptions& options = {});
  at::Tensor forward(const at::Tensor& x);

 private:
  Communicator comm_;
  ParallelDropoutOptions options_;
};
TORCH_MODULE(ParallelDropout);

/// For modules that have whole parameters but get only a part of the input on each rank, as between layers with
/// `sequence_dim`: from now on, when a backward has computed the gradient of a parameter of `module`, it is summed over
/// the ranks. Call it once per module.
void sum_gradients(Communicator& comm, torch::nn::Module& module);

/// torch's batch normalization, which in training uses mean and variance of all ranks' batches, of any sizes. A rank
/// without samples has to call it with an empty batch: DistributedDataParallel::step_without_samples runs no forward,
/// so the others would wait, or throw Mismatch. Evaluation does not communicate; without running statistics, a rank
/// uses the mean and variance of its own batch, like torch. Parameters and buffers have torch's names, so that torch's
/// values can be loaded. For data parallelism: gradients are those of the sum of all ranks' losses. The input is (N, C,
/// ...). Throws InvalidArgument if all ranks together have less than two values per channel. Costs one all_gather
/// forward and one all_reduce backward; no double backward.
class SyncBatchNormImpl : public torch::nn::Module {
 public:
  SyncBatchNormImpl(Communicator comm, const torch::nn::BatchNormOptions& options);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  Communicator comm_;
  torch::nn::BatchNormOptions options_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace cohort::nn
