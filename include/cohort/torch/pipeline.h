// Training of a model that is cut into stages, of which each rank keeps one (or, interleaved, several): a batch goes
// through the ranks as micro-batches, forwards one way and gradients back. The gradients are those of one process, to
// the bit. Owns its stages' layers, not the communicator's world. One thread per rank calls it.
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

/// A layer that is made by the rank that keeps it: from a function that returns a module (a holder, a shared_ptr, or a
/// torch::nn::AnyModule), of which forward takes a tensor and returns one. It makes a new one each time, and is called
/// twice, to see whether it does.
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

/// The same on all ranks, but for `loss` and `sample`.
struct PipelineOptions {
  pipeline::Schedule schedule = pipeline::Schedule::OneFOneB;
  /// Into how many parts a batch is cut, by its first dimension, as at::tensor_split does. Has to be said.
  int micro_batches = 0;
  /// Stages of each rank; more than 1 with Schedule::Interleaved only.
  int chunks = 1;
  /// Loss of the model's output and the target of a micro-batch; returns a scalar. Needed on the last rank.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss = {};

  // Division of the model into comm.size() * chunks stages. At most one of these three; with none of them all layers
  // count the same.

  /// The first layer of each stage but the first, counted from 0.
  std::vector<std::int64_t> cuts = {};
  /// Cost of each layer, in any unit; the slowest stage is to be as fast as can be.
  std::vector<double> costs = {};
  /// A micro-batch, on rank 0 (where others have one alone, all refuse it): the layers' costs are measured with it
  /// there, each layer alone. Their parameters, gradients, buffers and the state of random generators stay as they are.
  at::Tensor sample = {};

  /// Random numbers, of dropout in `step` and where layers are made by functions of their initial values, come from
  /// this number, the step's, the micro-batch's and the layer's: so they are the same for any number of ranks, any cut
  /// and any schedule. libtorch's generators are put back afterwards. Copies of a pipeline need seeds of their own, or
  /// they draw the same masks. Unset: each process's generators go on.
  std::optional<std::uint64_t> seed = {};
};

/// See the head of this file. Construction is collective; throws Mismatch on every rank if their layers' number or
/// options differ, InvalidArgument for what cannot be cut so, and for a parameter or buffer that layers of two stages
/// share: all on every rank.
///
/// Stage s is on rank s % comm.size(). Between stages goes one tensor of any dense type, in the host's memory or a
/// GPU's; a stage's inputs are put where its parameters are. What shape and type it has is told by who sends it, with
/// each message; receives are started ahead with those of the step before. (A step in which they change, as the last
/// one of an epoch may, costs one message more for each.) Any layer may change its input in place, as in one process.
///
/// Batches whose rows do not divide by the micro-batches are cut into parts that differ by one row; the loss, and the
/// gradient, is the mean over micro-batches. Of fewer rows than micro-batches each is a micro-batch, and
/// `micro_batches` is their number there; a batch has one row at least. Each micro-batch has as many rows of the target
/// as of the input.
///
/// Each rank's module in DistributedDataParallel, over the ranks that have the same stage:
/// `{ auto local = ddp.no_sync(); pipeline.step(x, y); } ddp.step_without_samples();`
///
/// An exception of a layer, the loss or autograd ends the step, and the communicator, on all ranks: Aborted, with the
/// stage, the micro-batch and the reason. A rank that dies: PeerLost, which names it.
class Pipeline {
 public:
  /// Keeps this rank's layers; the others die with `model`, if the caller does not keep it.
  Pipeline(const torch::nn::Sequential& model, Communicator comm, const PipelineOptions& options);
  /// Makes this rank's layers alone, so that no process ever holds the whole model. Named by their numbers.
  Pipeline(const std::vector<PipelineLayer>& layers, Communicator comm, const PipelineOptions& options);
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) = delete;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Forward and backward of all micro-batches, on all ranks; returns the mean loss on all of them. Gradients are added
  /// to what the parameters have, by ascending micro-batch: to the bit those of a process that calls
  /// `(loss / micro_batches).backward()` for one micro-batch after the other. (To the last digit only where a tensor
  /// between stages, or its gradient, is not contiguous: it arrives so, and kernels may sum in another order.) `input`
  /// is looked at on rank 0, `target` on the last one; other ranks may give undefined tensors. The first dimension of
  /// both is the batch.
  double step(const at::Tensor& input, const at::Tensor& target);
  /// The mean loss over micro-batches, without gradients. Leaves the modules in the mode in which they are: see `eval`.
  double evaluate(const at::Tensor& input, const at::Tensor& target);
  /// The model's outputs on the last rank, without gradients; undefined on the others.
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
  /// Describes in two lines what was chosen and the expected bubble. COHORT_LOG=plan writes it.
  const std::string& plan() const noexcept;
  /// Calls of `step`, on which random numbers depend where there is a seed; to be set where training is resumed.
  std::int64_t steps() const noexcept;
  void set_steps(std::int64_t steps);

 private:
  struct State;
  class Run;
  std::unique_ptr<State> state_;
};

}  // namespace cohort::nn
