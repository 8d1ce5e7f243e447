// Training with fewer synchronisations: every rank steps parameters of its own, and every `sync_every` steps all ranks
// meet. What travels then is how far each has come from the last synchronised parameters. LocalSGD takes their average
// (Stich 2018, arXiv 1805.09767); DiLoCo takes it for a gradient of an outer optimizer, SGD with Nesterov momentum
// (Douillard et al. 2023, arXiv 2311.08105), and may synchronise the parameters in fragments, in turns, while training
// goes on (Streaming DiLoCo, arXiv 2501.18512). Without a DistributedDataParallel, or over one whose ranks are fewer:
// of one host. One thread per rank.
//
//   torch::optim::AdamW optimizer(net->parameters(), 4e-4);
//   cohort::optim::DiLoCo diloco(*net, optimizer, comm, {.sync_every = 100});
//   ...  loss.backward();  optimizer.step();  diloco.step();
//   diloco.synchronize();  // at the end, and where all ranks need the same parameters
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>
#include <cohort/dtype.h>
#include <cohort/elastic.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cohort::optim {

struct LocalSGDOptions {
  std::int64_t sync_every = 10;    ///< steps from one synchronisation to the next
  std::int64_t warm_up_steps = 0;  ///< the first so many steps are all synchronised
  /// Format in which the differences from the last synchronised parameters travel between hosts.
  WireFormat wire_format = WireFormat::None;
};

struct DiLoCoOptions {
  std::int64_t sync_every = 100;     ///< H: steps from one synchronisation of a parameter to the next
  double outer_learning_rate = 0.7;  ///< with momentum 0 and rate 1: LocalSGD
  double outer_momentum = 0.9;
  bool nesterov = true;
  /// Parts of the model, of about one size and in the order of its parameters, that are synchronised in turns: one each
  /// `sync_every / fragments` steps, which has to be a whole number.
  int fragments = 1;
  /// tau: a synchronisation travels during so many steps, and its result is taken after them. Less than the steps from
  /// one to the next. 0: `step` waits for it.
  std::int64_t fragment_sync_delay = 0;
  /// How much of this rank's own parameters stays in the result, 0 to 1: 0 takes what all ranks agree on, and drops
  /// what the steps of the delay have changed. Streaming DiLoCo has 0.5 with a delay.
  double fragment_update_alpha = 0;
  /// Format in which pseudo-gradients travel between hosts.
  WireFormat wire_format = WireFormat::None;
};

class LocalCore;

/// Common base of LocalSGD and DiLoCo. All ranks call everything here alike, unless marked as not collective.
class LocalSteps {
 public:
  LocalSteps(const LocalSteps&) = delete;
  LocalSteps& operator=(const LocalSteps&) = delete;

  /// The optimizer has taken a step: as often on all ranks. `samples`: how much this rank's part of the next average
  /// counts for it, such as its batch's size; 0: it had none. Synchronises where that is due. Throws what all_reduce
  /// does, Mismatch where ranks have different options, or where any has had a number of samples that is negative or
  /// not finite since the last synchronisation (InvalidArgument where all have, or there is no other rank), NonFinite
  /// on all ranks where the average would be NaN or infinite (the last synchronised parameters stay), and
  /// InvalidArgument for parameters that were unfrozen or replaced since, or that the optimizer steps and the module
  /// does not have: they would never be averaged.
  void step(double samples = 1);
  /// Now, all fragments: afterwards parameters, and buffers of floating types, are the same on all ranks, to the bit.
  /// As `step`; also InvalidArgument if weights were loaded and no step has been taken since the last synchronisation.
  void synchronize();
  /// Weights were loaded on all ranks: training goes on from rank 0's parameters and buffers, and the outer optimizer
  /// has no momentum yet. What others than the optimizer write to parameters counts as a step of training otherwise, so
  /// an outer momentum would go on in that direction. Collective, where there is a communicator.
  void parameters_written();
  /// Until the next synchronisation of a fragment. Not collective.
  std::int64_t steps_left() const noexcept;

  /// State that this rank needs to go on from here, to the bit, also between synchronisations: parameters, buffers, the
  /// optimizer's state and what all ranks have alike. For CheckpointFolder::save's `state`, since a checkpoint's model
  /// and optimizer are rank 0's. Waits for what is under way. Not collective.
  std::map<std::string, at::Tensor> state();
  /// The same rank's, once model and optimizer have been loaded. Of another rank's (a world has become larger): with
  /// `own` false, which takes what all ranks have alike, and that rank's buffers, and begins from there. Throws
  /// InvalidArgument for what does not fit. Not collective.
  void load_state(const std::map<std::string, at::Tensor>& state, bool own = true);

  const std::shared_ptr<LocalCore>& core() const noexcept { return core_; }

  struct Options : DiLoCoOptions {
    std::int64_t warm_up_steps = 0;
  };

 protected:
  ~LocalSteps() = default;
  LocalSteps(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm, const Options& options);

 private:
  void begin();

  std::shared_ptr<LocalCore> core_;
};

/// Parameters averaged each `sync_every` steps. Module and optimizer have to outlive it; it begins with rank 0's
/// parameters and buffers (collective). In an elastic job without `comm`: each world brings its own.
/// Parameters that need no gradient, and those that are no floating numbers, stay each rank's; so do the optimizer's
/// moments. Buffers of floating types (statistics of BatchNorm) are averaged. Throws InvalidArgument for options
/// without a meaning, and where the optimizer steps parameters that the module does not have.
class LocalSGD : public LocalSteps {
 public:
  LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm,
           const LocalSGDOptions& options = {});
  LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const LocalSGDOptions& options = {})
      : LocalSGD(module, optimizer, Communicator(), options) {}
};

/// As LocalSGD, with an outer optimizer: m = outer_momentum * m + d; p -= outer_learning_rate * (d + outer_momentum *
/// m), where d is the average over ranks of last synchronised minus own parameters. float32, or float64 where a
/// parameter is, whatever the parameters' types.
class DiLoCo : public LocalSteps {
 public:
  DiLoCo(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm,
         const DiLoCoOptions& options = {})
      : LocalSteps(module, optimizer, std::move(comm), {options}) {}
  DiLoCo(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const DiLoCoOptions& options = {})
      : DiLoCo(module, optimizer, Communicator(), options) {}
};

/// `state.add("diloco", diloco)`, instead of the module and the optimizer: a rank that comes gets the last synchronised
/// parameters, the outer momentum, the learning rates and how many steps are left until the next synchronisation. Those
/// that stay lose no step. State::step synchronises then, once the step has ended.
void attach(elastic::State& state, const std::string& name, LocalSteps& steps);

}  // namespace cohort::optim
