// Training with fewer synchronisations: every rank trains its own copy of the parameters, and every `sync_every` steps
// all ranks exchange the differences of their parameters from the last synchronised ones. LocalSGD applies the average
// difference (Stich 2018, arXiv 1805.09767); DiLoCo uses the average as a gradient of an outer optimizer, SGD with
// Nesterov momentum (Douillard et al. 2023, arXiv 2311.08105), and may synchronise the parameters in fragments, in
// turns, while training goes on (Streaming DiLoCo, arXiv 2501.18512). Use it without a DistributedDataParallel, or over
// one with fewer ranks, such as those of one host. One thread per rank.
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
  std::int64_t warm_up_steps = 0;  ///< number of steps at the beginning that are all synchronised
  /// Format in which the differences from the last synchronised parameters travel between hosts.
  WireFormat wire_format = WireFormat::None;
};

struct DiLoCoOptions {
  std::int64_t sync_every = 100;     ///< H: steps from one synchronisation of a parameter to the next
  double outer_learning_rate = 0.7;  ///< a rate of 1 with momentum 0 makes this LocalSGD
  double outer_momentum = 0.9;
  bool nesterov = true;
  /// Number of parts of the model, of about the same size and in the order of its parameters, that are synchronised in
  /// turn: one every `sync_every / fragments` steps, which has to be a whole number.
  int fragments = 1;
  /// tau: number of steps during which a synchronisation runs, and after which its result is applied. Less than the
  /// steps between two synchronisations. 0: `step` waits for the result.
  std::int64_t fragment_sync_delay = 0;
  /// Weight of this rank's own parameters in the result, 0 to 1: 0 takes the synchronised parameters, and drops the
  /// changes of the steps during the delay. Streaming DiLoCo has 0.5 with a delay.
  double fragment_update_alpha = 0;
  /// Format in which pseudo-gradients travel between hosts.
  WireFormat wire_format = WireFormat::None;
};

class LocalCore;

/// Common base of LocalSGD and DiLoCo. All functions are collective, unless marked otherwise.
class LocalSteps {
 public:
  LocalSteps(const LocalSteps&) = delete;
  LocalSteps& operator=(const LocalSteps&) = delete;

  /// Call it after each step of the optimizer, equally often on all ranks. `samples`, such as the batch's size, is the
  /// weight of this rank's step in the next average; 0: no samples. Synchronises if due. Throws what all_reduce throws;
  /// Mismatch if ranks have different options, or if any rank gave a number of samples that is negative or not finite
  /// since the last synchronisation (InvalidArgument if all did, or there is no other rank); NonFinite on all ranks if
  /// the average would be NaN or infinite (the last synchronised parameters stay); and InvalidArgument for parameters
  /// that were unfrozen or replaced since, or that the optimizer steps and the module does not have, since they would
  /// never be averaged.
  void step(double samples = 1);
  /// Synchronises all fragments immediately: afterwards parameters, and buffers of floating types, are the same on all
  /// ranks, to the bit. Throws as `step`; also InvalidArgument if weights were loaded and no step has been taken since
  /// the last synchronisation.
  void synchronize();
  /// Call it when weights were loaded on all ranks: training goes on from rank 0's parameters and buffers, and the
  /// outer optimizer's momentum is zero. Without this call, such a change of parameters counts as training, and an
  /// outer momentum would continue in that direction. Collective if there is a communicator.
  void parameters_written();
  /// Number of steps until the next synchronisation of a fragment. Not collective.
  std::int64_t steps_left() const noexcept;

  /// Returns the state from which this rank resumes, to the bit, also between synchronisations: parameters, buffers,
  /// the optimizer's state and the state common to all ranks. Pass it to CheckpointFolder::save as `state`, since a
  /// checkpoint's model and optimizer are rank 0's. Waits for a running synchronisation. Not collective.
  std::map<std::string, at::Tensor> state();
  /// Loads this rank's own state; call it after loading model and optimizer. In a world that has grown, a new rank
  /// loads another rank's state with `own` false: this takes only the common state and that rank's buffers. Throws
  /// InvalidArgument for a state that does not fit. Not collective.
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

/// Averages parameters each `sync_every` steps. Module and optimizer have to outlive it. Training begins with rank 0's
/// parameters and buffers (collective). In an elastic job, omit `comm`: each world has its own. Parameters that need no
/// gradient, or are not floating-point, remain each rank's own; so do the optimizer's moments. Buffers of floating
/// types (statistics of BatchNorm) are averaged. Throws InvalidArgument for options without a meaning, and if the
/// optimizer steps parameters that the module does not have.
class LocalSGD : public LocalSteps {
 public:
  LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm,
           const LocalSGDOptions& options = {});
  LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const LocalSGDOptions& options = {})
      : LocalSGD(module, optimizer, Communicator(), options) {}
};

/// Like LocalSGD, with an outer optimizer: m = outer_momentum * m + d; p -= outer_learning_rate * (d + outer_momentum *
/// m), where d is the average over ranks of (last synchronised - own) parameters. Computed in float64 if a parameter
/// has that type, else in float32.
class DiLoCo : public LocalSteps {
 public:
  DiLoCo(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Communicator comm,
         const DiLoCoOptions& options = {})
      : LocalSteps(module, optimizer, std::move(comm), {options}) {}
  DiLoCo(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const DiLoCoOptions& options = {})
      : DiLoCo(module, optimizer, Communicator(), options) {}
};

/// `state.add("diloco", diloco)`, instead of the module and the optimizer. A new rank gets the last synchronised
/// parameters, the outer momentum, the learning rates and the number of steps left until the next synchronisation. The
/// other ranks lose no step. State::step then synchronises, after the step has ended.
void attach(elastic::State& state, const std::string& name, LocalSteps& steps);

}  // namespace cohort::optim
