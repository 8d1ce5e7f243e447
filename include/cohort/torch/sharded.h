// An optimizer of which each rank does its part (ZeRO; Rajbhandari et al. 2020, arXiv 1910.02054), over a
// DistributedDataParallel with `sharding`: it is one of libtorch's, over this rank's pieces of the parameters, so
// options, parameter groups and learning-rate schedules are as ever. One thread per rank.
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
  std::string parameter;  ///< its name in the module
  at::Tensor parameter_tensor;
  at::Tensor tensor;       ///< 1-D; what the optimizer has as a parameter. float32 where the parameter is of 16 bits
  std::int64_t begin = 0;  ///< in the parameter
};

/// Ranks whose gradients are one model's, where ranks hold parts of it.
struct ClipOptions {
  /// All ranks: `mesh.comm()`. Empty: those of the DistributedDataParallel.
  Communicator over = {};
  /// The ranks that divide layers, `mesh.along("tp")`: what no module there names as a part (HasShards) each of them
  /// has whole, and it counts once.
  Communicator parts = {};
};

/// As ShardedCore::clip_grad_norm, for gradients that are not divided: scales those of `module`, on all ranks of
/// `options.over`, which has to be given. The ranks of `copies`, `mesh.along("dp")`, have the same ones. Collective.
double clip_grad_norm(torch::nn::Module& module, double max_norm, const ClipOptions& options, Communicator copies = {});

/// All of Sharded that does not depend on the optimizer's type.
class ShardedCore {
 public:
  ShardedCore(const ShardedCore&) = delete;
  ShardedCore& operator=(const ShardedCore&) = delete;

  /// By ascending parameter. A rank may have none.
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  nn::DataParallelCore& model() const noexcept { return model_; }
  /// Master weights have been set, too, and are not made anew of what was written to parameters.
  void masters_written() noexcept;
  /// In between, others than the optimizer may write to parameters that are protected (protect_parameters).
  void allow_writes();
  void forbid_writes();

  /// Scales the gradients of its groups so that their norm over all ranks is at most `max_norm`; returns what it was.
  /// As torch::nn::utils::clip_grad_norm_ with norm_type 2 (also of what is not finite), but that squares are summed in
  /// float64, by rank. Collective; between backward and step. With tensor parallelism or a pipeline say so in
  /// `options`: each rank has only a part of the norm. Throws InvalidArgument unless max_norm is
  /// above 0, and for a module of parts (HasShards) without them; Mismatch on all ranks where these differ in it, or in
  /// the options of their optimizers. (torch::nn::utils::clip_grad_norm_ finds no gradients where they are divided, and
  /// clips nothing.)
  double clip_grad_norm(double max_norm, const ClipOptions& options = {});
  /// No parameter of its groups, and no piece, has a gradient any more. (The module's own zero_grad does not know of
  /// divided gradients; `step` drops them in any case.)
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
  /// Options that have to be the same on all ranks: groups, their members and options.
  std::vector<step::Option> told() const;
  void require_reduced() const;
  void note_clipping_by_others();

  nn::DataParallelCore& model_;
  const std::shared_ptr<nn::Reducer> reducer_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> own_;                // their numbers among those of the model
  std::vector<at::Tensor> trained_;             // the parameters that they are of
  std::vector<std::int64_t> writes_;            // by piece: those to its parameter that its master has
  std::map<const void*, std::size_t> free_;     // parameters that are in no group yet, by TensorImpl
  std::map<std::size_t, std::size_t> members_;  // by parameter: its group
  std::size_t groups_ = 0;
  std::unique_ptr<step::Transaction> transaction_;
  bool compared_ = false;  // the options, by this step's clip_grad_norm
  bool clips_ = false;
};

/// Whether an optimizer works on each element alone, without norms, factors or shapes of whole parameters: in pieces it
/// would be another one otherwise. To be specialised for those that are not libtorch's.
template <class Optimizer>
inline constexpr bool works_elementwise =
    std::same_as<Optimizer, torch::optim::SGD> || std::same_as<Optimizer, torch::optim::Adam> ||
    std::same_as<Optimizer, torch::optim::AdamW> || std::same_as<Optimizer, torch::optim::Adagrad> ||
    std::same_as<Optimizer, torch::optim::RMSprop>;

/// The optimizer `Base` of libtorch (SGD, Adam, AdamW, Adagrad, RMSprop: those that work on each element alone), of
/// which every rank keeps the state of its pieces and steps them. `step` is collective: afterwards all ranks have all
/// parameters, to the bit those that an unsharded `Base` gives. (clip_grad_norm apart, whose norm may differ in its
/// last digits.) It throws Mismatch on all ranks, before anything is changed, where their groups or options differ, or
/// (where gradients are not divided) which parameters have a gradient, or gradients that no_sync has left and no
/// backward outside of it has averaged; where gradients are divided such ones are InvalidArgument.
/// Parameters of Half or BFloat16 are stepped in float32 ("master weights"), which this keeps, and rounded afterwards;
/// torch::save does not know them, CheckpointFolder does. A parameter without a gradient is left alone, as by `Base`.
/// The model has to outlive it.
template <class Base>
class Sharded : public ShardedCore, public Base {
  static_assert(std::derived_from<Base, torch::optim::Optimizer> && works_elementwise<Base>,
                "Sharded is for optimizers that work on each element alone (works_elementwise)");

 public:
  /// Over all parameters that `model` trains. Throws InvalidArgument where the model has no `sharding`.
  template <class Options>
  Sharded(nn::DataParallelCore& model, Options defaults)
      : ShardedCore(model), Base(divide(all()), std::move(defaults)) {
    optimizer_ = this;
  }
  /// Over parameters of the model. Frozen ones are passed over. Throws InvalidArgument for other tensors.
  template <class Options>
  Sharded(nn::DataParallelCore& model, const std::vector<at::Tensor>& parameters, Options defaults)
      : Sharded(model, Groups(1, torch::optim::OptimizerParamGroup(parameters)), std::move(defaults)) {}
  /// Over groups of the model's parameters, so that a model may have several optimizers, of which each parameter has
  /// one. As above.
  template <class Options>
  Sharded(nn::DataParallelCore& model, const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults)
      : ShardedCore(model), Base(divide(groups), std::move(defaults)) {
    optimizer_ = this;
  }

  using ShardedCore::zero_grad;

  /// On all ranks alike: of parameters that no group has yet. (That of torch::optim::Optimizer would step them whole,
  /// which the next step refuses.)
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
