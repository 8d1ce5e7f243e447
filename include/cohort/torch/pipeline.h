// Training of a model that is cut into stages. Each rank has one stage (or, interleaved, several): a batch passes
// through the ranks as micro-batches, activations one way and gradients back. The gradients are those of one process,
// to the bit. Owns its stages' layers, not the communicator's world. One thread per rank calls it.
//
//   cohort::nn::Pipeline pipeline(torch::nn::Sequential(...), comm, {.micro_batches = 16, .loss = mse});
//   torch::optim::Adam optimizer(pipeline.parameters(), 1e-3);          // of this rank's stage
//   ...  pipeline.zero_grad();  double loss = pipeline.step(input, target);  optimizer.step();
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>
#include <cohort/pipeline.h>

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cohort::nn {

/// A layer that is created on the rank that keeps it, by a function that returns a module (a holder, a shared_ptr, or a
/// torch::nn::AnyModule) whose forward takes and returns one tensor. The function has to make a new module in each
/// call; it is called twice, to check that.
class PipelineLayer {
 public:
  template <class Make>
  requires(std::invocable<Make&> && !std::same_as<std::decay_t<Make>, PipelineLayer>)
      PipelineLayer(Make make)  // NOLINT(google-explicit-constructor): a list of lambdas should read well
      : make_([make = std::move(make)]() mutable { return as_any(make()); }) {}
  torch::nn::AnyModule make() const { return make_(); }

 private:
  template <class M>
  static torch::nn::AnyModule as_any(M&& module) {
    return torch::nn::AnyModule(std::forward<M>(module));
  }
  std::function<torch::nn::AnyModule()> make_;
};

/// Options are the same on all ranks, except `loss` and `sample`.
struct PipelineOptions {
  pipeline::Schedule schedule = pipeline::Schedule::OneFOneB;
  /// Number of parts into which a batch is cut, by its first dimension, as at::tensor_split does. Has to be set.
  int micro_batches = 0;
  /// Stages of each rank; more than 1 with Schedule::Interleaved only.
  int chunks = 1;
  /// Computes the loss of a micro-batch, a scalar, from the model's output and the target. Needed on the last rank.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss = {};

  // Division of the model into comm.size() * chunks stages. Set at most one of these three; without any, all layers
  // count the same.

  /// The first layer of each stage but the first, counted from 0.
  std::vector<std::int64_t> cuts = {};
  /// Cost of each layer, in any unit; the model is cut so that the slowest stage is as fast as possible.
  std::vector<double> costs = {};
  /// A micro-batch, with which rank 0 measures each layer's cost (an error on all ranks if only other ranks have one).
  /// The layers' parameters, gradients, buffers and the state of random generators do not change.
  at::Tensor sample = {};

  /// Random numbers (dropout in `step`, initial values of layers made by functions) are determined by this seed and the
  /// numbers of the step, the micro-batch and the layer: so they are the same for any number of ranks, any cut and any
  /// schedule. libtorch's generators are restored afterwards. Give copies of a pipeline different seeds, or they draw
  /// the same masks. Unset: each process's generators are used as they are.
  std::optional<std::uint64_t> seed = {};
};

/// See the head of this file. Construction is collective. On every rank, throws Mismatch if the ranks' numbers of
/// layers or options differ, InvalidArgument for a division that is impossible, or if layers of two stages share a
/// parameter or buffer.
///
/// Stage s is on rank s % comm.size(). A stage passes one tensor of any dense type, in host or GPU memory, to the next,
/// which moves it to the device of its parameters. Each message carries the tensor's shape and type; receives are
/// started early, with the shape and type of the previous step. (If they change, as in the last step of an epoch, each
/// tensor costs one more message.) Any layer may change its input in place, as in one process.
///
/// Batches whose rows do not divide by the micro-batches are cut into parts that differ by one row; the loss, and the
/// gradient, is the mean over micro-batches. If a batch has fewer rows than `micro_batches`, each row is a micro-batch;
/// a batch has at least one row. Each micro-batch has as many rows of the target as of the input.
///
/// For data parallelism, wrap each rank's module in DistributedDataParallel, over the ranks that have the same stage:
/// `{ auto local = ddp.no_sync(); pipeline.step(x, y); } ddp.step_without_samples();`
///
/// An exception of a layer, the loss or autograd ends the step and the communicator. All ranks then throw Aborted, with
/// the stage, the micro-batch and the reason. If a rank dies, the others throw PeerLost, which names it.
class Pipeline {
 public:
  /// Keeps this rank's layers; the other layers are destroyed with `model`, unless the caller keeps it.
  Pipeline(const torch::nn::Sequential& model, Communicator comm, const PipelineOptions& options);
  /// Makes only this rank's layers, so that no process ever holds the whole model. Layers are named by their numbers.
  Pipeline(const std::vector<PipelineLayer>& layers, Communicator comm, const PipelineOptions& options);
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) = delete;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Runs forward and backward of all micro-batches, on all ranks; returns the mean loss on all ranks. Gradients are
  /// added to the parameters' existing ones, by ascending micro-batch, and equal, to the bit, the gradients of one
  /// process that calls `(loss / micro_batches).backward()` for each micro-batch in turn. (The last digit may differ if
  /// a tensor between stages, or its gradient, is not contiguous: it arrives contiguous, and kernels may sum in another
  /// order.) Rank 0 reads `input`, the last rank `target`; other ranks may give undefined tensors. The first dimension
  /// of both is the batch.
  double step(const at::Tensor& input, const at::Tensor& target);
  /// Returns the mean loss over micro-batches, without gradients. Does not change the modules' mode: see `eval`.
  double evaluate(const at::Tensor& input, const at::Tensor& target);
  /// Returns the model's outputs on the last rank, without gradients; undefined on the others.
  at::Tensor forward(const at::Tensor& input);

  /// This rank's layers, as children with their names in the whole model: for optimizers and checkpoints.
  const std::shared_ptr<torch::nn::Module>& module() const noexcept;
  std::vector<at::Tensor> parameters() const;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  /// Makes all gradients of this rank undefined.
  void zero_grad();
  void train(bool on = true);
  void eval();

  /// The first layer of each stage but the first.
  const std::vector<std::int64_t>& cuts() const noexcept;
  /// Describes the chosen plan and the expected bubble in two lines. COHORT_LOG=plan logs them.
  const std::string& plan() const noexcept;
  /// Number of calls of `step`. With a seed, random numbers depend on it; set it when training is resumed.
  std::int64_t steps() const noexcept;
  void set_steps(std::int64_t steps);

 private:
  struct State;
  class Run;
  std::unique_ptr<State> state_;
};

}  // namespace cohort::nn
