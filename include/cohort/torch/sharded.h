// An optimizer that is divided over the ranks (ZeRO; Rajbhandari et al. 2020, arXiv 1910.02054), for a
// DistributedDataParallel with `sharding`. It is a libtorch optimizer over this rank's pieces of the parameters, so
// options, parameter groups and learning-rate schedules work as usual. One thread per rank.
//
//   cohort::nn::DistributedDataParallel model(net, comm, {.sharding = cohort::nn::Sharding::Parameters});
//   cohort::optim::Sharded<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
//   ...  loss.backward();  optimizer.clip_grad_norm(1.0);  optimizer.step();  optimizer.zero_grad();
#pragma once

#include <cohort/torch/nn.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cohort::step {
struct Option;
class Transaction;
}  // namespace cohort::step

namespace cohort::optim {

/// A range of a parameter's elements, in row-major order, that this rank steps.
struct Piece {
  std::string parameter;  ///< the parameter's name in the module
  at::Tensor parameter_tensor;
  at::Tensor tensor;       ///< 1-D; the optimizer's parameter; float32 if the model's parameter has 16 bits
  std::int64_t begin = 0;  ///< offset in the parameter
};

/// Ranks that share one model's gradients, if ranks hold parts of a model.
struct ClipOptions {
  /// All ranks: `mesh.comm()`. Empty: the ranks of the DistributedDataParallel.
  Communicator over = {};
  /// The ranks that divide layers, `mesh.along("tp")`. A parameter that no HasShards names is whole on each of these
  /// ranks, and counts once.
  Communicator parts = {};
};

/// Like ShardedCore::clip_grad_norm, for gradients that are not divided: scales the gradients of `module`, on all ranks
/// of `options.over`, which has to be given. The ranks of `copies`, `mesh.along("dp")`, have the same gradients.
/// Collective.
double clip_grad_norm(torch::nn::Module& module, double max_norm, const ClipOptions& options, Communicator copies = {});

/// All of Sharded that does not depend on the optimizer's type.
class ShardedCore {
 public:
  ShardedCore(const ShardedCore&) = delete;
  ShardedCore& operator=(const ShardedCore&) = delete;

  /// This rank's pieces, by ascending parameter; may be empty.
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  nn::DataParallelCore& model() const noexcept { return model_; }
  /// Notes that master weights have been written with the parameters, and need not be recomputed from the parameters.
  void masters_written() noexcept;
  /// Between these calls, code other than the optimizer may write to protected parameters (protect_parameters).
  void allow_writes();
  void forbid_writes();

  /// Scales the gradients of the optimizer's groups so that their norm over all ranks is at most `max_norm`; returns
  /// the norm before. Like torch::nn::utils::clip_grad_norm_ with norm_type 2 (also for gradients that are not finite),
  /// except that squares are summed in float64, by rank. Collective; call it between backward and step. With tensor
  /// parallelism or a pipeline each rank has only a part of the norm, so `options` are needed. Throws InvalidArgument
  /// unless max_norm is above 0, and for a module with parts (HasShards) without `options`; Mismatch on all ranks if
  /// they differ in max_norm, or in the options of their optimizers. (If gradients are divided,
  /// torch::nn::utils::clip_grad_norm_ finds none, and clips nothing.)
  double clip_grad_norm(double max_norm, const ClipOptions& options = {});
  /// Makes the gradients of all parameters and pieces of the optimizer's groups undefined. (The module's own zero_grad
  /// does not know of divided gradients; `step` drops these in any case.)
  void zero_grad();

 protected:
  explicit ShardedCore(nn::DataParallelCore& model);
  ~ShardedCore();
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  Groups all() const;
  /// Divides the model's parameters; returns this rank's pieces. Throws InvalidArgument before anything is changed.
  Groups divide(const Groups& groups);
  void before_step();
  void after_step();
  const torch::optim::Optimizer* optimizer_ = nullptr;  // this

 private:
  std::size_t parameter_of(std::size_t piece) const noexcept;
  /// Options that have to be the same on all ranks: groups, with their members and options.
  std::vector<step::Option> told() const;
  void require_reduced() const;
  void note_clipping_by_others();

  nn::DataParallelCore& model_;
  const std::shared_ptr<nn::Reducer> reducer_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> own_;                // by piece: its parameter's number in the model
  std::vector<at::Tensor> trained_;             // by piece: its parameter
  std::vector<std::int64_t> writes_;            // by piece: the writes to its parameter that its master weights include
  std::map<const void*, std::size_t> free_;     // parameters that are in no group yet, by TensorImpl
  std::map<std::size_t, std::size_t> members_;  // by parameter: its group
  std::size_t groups_ = 0;
  std::unique_ptr<step::Transaction> transaction_;
  bool compared_ = false;  // true if this step's clip_grad_norm has compared the options
  bool clips_ = false;
};

/// True if an optimizer works on each element separately, without norms, factors or shapes of whole parameters. Only
/// then does it do the same on pieces. Specialise it for optimizers that are not libtorch's.
template <class Optimizer>
inline constexpr bool works_elementwise =
    std::same_as<Optimizer, torch::optim::SGD> || std::same_as<Optimizer, torch::optim::Adam> ||
    std::same_as<Optimizer, torch::optim::AdamW> || std::same_as<Optimizer, torch::optim::Adagrad> ||
    std::same_as<Optimizer, torch::optim::RMSprop>;

/// The libtorch optimizer `Base` (SGD, Adam, AdamW, Adagrad, RMSprop, which work on each element separately), divided
/// over the ranks: every rank keeps and steps its own pieces. `step` is collective: afterwards all ranks have all
/// parameters, to the bit those of an unsharded `Base` (except after clip_grad_norm, whose norm may differ in its last
/// digits). `step` throws Mismatch on all ranks, before anything is changed, if their groups or options differ. If
/// gradients are not divided, it also throws Mismatch if ranks differ in which parameters have a gradient, or if there
/// are gradients of a no_sync that no backward outside of it has averaged; if gradients are divided, the latter is
/// InvalidArgument. Parameters of Half or BFloat16 are stepped in float32 ("master weights", kept here) and then
/// rounded; torch::save does not save master weights, CheckpointFolder does. A parameter without a gradient is not
/// changed, as by `Base`. The model has to outlive the optimizer.
template <class Base>
class Sharded : public ShardedCore, public Base {
  static_assert(std::derived_from<Base, torch::optim::Optimizer> && works_elementwise<Base>,
                "Sharded is for optimizers that work on each element alone (works_elementwise)");

 public:
  /// Optimizes all parameters that `model` trains. Throws InvalidArgument if the model has no `sharding`.
  template <class Options>
  Sharded(nn::DataParallelCore& model, Options defaults)
      : ShardedCore(model), Base(divide(all()), std::move(defaults)) {
    optimizer_ = this;
  }
  /// Optimizes these parameters of the model, except frozen ones. Throws InvalidArgument for other tensors.
  template <class Options>
  Sharded(nn::DataParallelCore& model, const std::vector<at::Tensor>& parameters, Options defaults)
      : Sharded(model, Groups(1, torch::optim::OptimizerParamGroup(parameters)), std::move(defaults)) {}
  /// Optimizes groups of the model's parameters. A model may have several optimizers, but each parameter has one.
  template <class Options>
  Sharded(nn::DataParallelCore& model, const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults)
      : ShardedCore(model), Base(divide(groups), std::move(defaults)) {
    optimizer_ = this;
  }

  using ShardedCore::zero_grad;

  /// Adds a group of parameters that are in no group yet; call it in the same way on all ranks.
  /// (torch::optim::Optimizer's own function would step them whole, which the next step refuses.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Base::add_param_group(divide({group}).front());
  }

  /// Collective. `closure` computes the loss and its gradients, once.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable(true);
      loss = closure();
    }
    before_step();
    Base::step();
    after_step();
    return loss;
  }
};

}  // namespace cohort::optim
