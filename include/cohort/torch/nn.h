// Data-parallel training of a torch::nn::Module: every rank holds a replica and its own part of each batch, and
// backward() leaves the average gradient in every replica's parameters. Owns the gradients' memory, not the
// communicator's world. One thread per rank calls it (forward, backward, join); ranks may be threads of one process.
//
//   cohort::Communicator comm = cohort::join();
//   Net net;                                                  // a module holder, or a shared_ptr to a module
//   cohort::nn::DistributedDataParallel model(net, comm);
//   torch::optim::SGD optimizer(model.parameters(), 0.1);
//   ...  auto loss = torch::nll_loss(model(images), labels);  loss.backward();  optimizer.step();
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>
#include <cohort/gradients.h>
#include <cohort/observer.h>
#include <cohort/torch/comm_hooks.h>
#include <cohort/torch/finite.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cohort::nn {

class Reducer;

}  // namespace cohort::nn

namespace cohort::optim {
class ShardedCore;
}

namespace cohort::nn {

/// Local accumulation: while one lives, forward and backward passes do not communicate. Their gradients are summed
/// by autograd and their sample counts added, and the next synchronising backward reduces them together. Scale the
/// losses so that the sum is this rank's mean, as in any accumulation (k equal micro-batches: loss / k). Nests.
class [[nodiscard]] NoSyncGuard {
 public:
  explicit NoSyncGuard(std::shared_ptr<Reducer> reducer);
  NoSyncGuard(NoSyncGuard&&) noexcept = default;
  NoSyncGuard& operator=(NoSyncGuard&&) = delete;
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;
  ~NoSyncGuard();

 private:
  std::shared_ptr<Reducer> reducer_;
};

/// All of DistributedDataParallel that does not depend on the module's type.
class DataParallelCore {
 public:
  DataParallelCore(std::shared_ptr<torch::nn::Module> module, Communicator comm,
                   const DistributedDataParallelOptions& options);
  ~DataParallelCore();
  DataParallelCore(const DataParallelCore&) = delete;
  DataParallelCore& operator=(const DataParallelCore&) = delete;

  Communicator& communicator() noexcept;

  /// Module's, for optimizers and checkpoints: the names have no prefix.
  std::vector<at::Tensor> parameters() const;
  /// Parameters, then buffers, by their names in the module; the tensors themselves, not copies.
  torch::OrderedDict<std::string, at::Tensor> state_dict() const;
  void train(bool on = true);
  void eval();
  /// Makes all gradients undefined: the cheapest way, since the next backward then writes instead of adding.
  /// torch's own zero_grad, in either form, is just as correct, but for divided gradients (Sharding::Gradients,
  /// Parameters), which it does not know of.
  void zero_grad();

  /// The number of samples of the next forward with gradients on: the weight of this rank's gradient in the average
  /// over ranks, in place of what a sampler or `samples` would say. All ranks say it, or none. 0, which any rank may
  /// say: this rank contributes nothing, and what its backward yields (NaN, too) is dropped. Throws InvalidArgument if
  /// negative.
  void set_sample_count(std::int64_t samples);

  NoSyncGuard no_sync();

  /// Gradients go through this instead of being averaged: see <cohort/torch/comm_hooks.h>. Once, before the first
  /// backward, the same on all ranks. Throws InvalidArgument otherwise, and with what a hook cannot be right with:
  /// Sharding::Gradients and Parameters, wire_format, parameters on a GPU. `join` is refused from now on.
  void register_comm_hook(CommHook hook);

  /// Takes the place of forward and backward on a rank that has no sample, for models that cannot run an empty batch
  /// (BatchNorm): takes part in the buffers' broadcast and all reductions with weight 0, and leaves the others' average
  /// in the gradients. Returns false if no rank had samples; then there are no gradients and nothing is to be done. So
  /// ranks whose inputs end early can stay in step, optimizer included, until all have ended:
  /// `while (model.step_without_samples()) { optimizer.step(); optimizer.zero_grad(); }`. Not inside no_sync.
  bool step_without_samples();

  /// This rank has no more input: serves the others' steps with weight 0 until all ranks have called `join`. Then
  /// ranks that missed steps receive parameters and buffers of the lowest rank that took the most (all of them equal).
  /// Optimizer states are not sent: where training goes on afterwards, use `step_without_samples` instead. Returns the
  /// rank whose model all have now. Blocks for as long as the others train, each of its waits under the communicator's
  /// timeout.
  int join();

  /// Overwrites all ranks' buffers with rank 0's, now; collective. Worth doing before an evaluation spread over the
  /// ranks: forwards in no_grad mode do not communicate.
  void sync_buffers();

  /// Compares parameters and buffers of all ranks to the bit, now; collective. Throws Mismatch on every rank if they
  /// differ: see `require_same_parameters`. Buffers differ rightly between two forwards that synchronise them.
  void require_same_parameters();

  /// With Sharding: all ranks have written the same values to parameters (weights were loaded), in place or by giving
  /// them other memory (torch::load), and the optimizer goes on from these. Collective. Without Sharding nothing is to
  /// be done, nor after CheckpointFolder::load_latest(ModelShards).
  void parameters_written();

  /// Rounding errors of this rank's gradients, which are added to the next ones (`error_feedback`): a flat tensor of
  /// each parameter, "residual.NAME", copied; empty without error feedback. Each rank's own, for
  /// `CheckpointFolder::save`; training goes on with the same bits where each host has one rank. (Elsewhere the first
  /// step's buckets, which are those of a new model, are divided otherwise.)
  std::map<std::string, at::Tensor> residuals() const;
  /// From `residuals()` of this rank, or a map that has them (CheckpointFolder::rank_state); other names are passed
  /// over, and what is missing becomes zero. Throws InvalidArgument for sizes that are not the parameter's. Not
  /// collective.
  void load_residuals(const std::map<std::string, at::Tensor>& residuals);

  ReducerStats stats() const;
  /// Place of the gradient of parameter `name`; throws InvalidArgument if there is none.
  BucketSlot slot_of(const std::string& name) const;

 protected:
  /// Begins a forward pass. False: its outputs are of no concern.
  bool before_forward(const std::vector<at::Tensor>& inputs);
  /// Learns from an output of the pass when a backward begins.
  void after_forward(const std::vector<at::Tensor>& outputs);

 private:
  friend class optim::ShardedCore;
  const std::shared_ptr<Reducer>& reducer() const noexcept;
  const std::shared_ptr<torch::nn::Module>& whole() const noexcept;

  struct State;
  std::unique_ptr<State> state_;
};

/// Calls `visit` with each tensor in what a forward takes or returns: tensors, optionals, vectors, arrays, pairs and
/// tuples of them, nested as may be. Other types are passed over.
template <class T, class Visit>
void visit_tensors(T& value, const Visit& visit) {
  using Tensor = std::conditional_t<std::is_const_v<T>, const at::Tensor, at::Tensor>;
  if constexpr (std::convertible_to<T&, Tensor&>) {
    Tensor& tensor = value;
    visit(tensor);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) visit_tensors(*value, visit);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&visit](auto&... items) { (visit_tensors(items, visit), ...); }, value);
  } else if constexpr (requires { value.begin() != value.end(); } && !std::convertible_to<T&, std::string>) {
    // Not numbers, and not what consists of its own kind without end (a path).
    using Item = std::decay_t<decltype(*value.begin())>;
    if constexpr (!std::is_arithmetic_v<Item> && !std::is_same_v<Item, std::remove_const_t<T>>) {
      for (auto&& item : value) visit_tensors(item, visit);
    }
  }
}

/// Those that are defined.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& out) {
  visit_tensors(value, [&out](const at::Tensor& tensor) {
    if (tensor.defined()) out.push_back(tensor);
  });
}

/// See the head of this file. M is the module's type (`NetImpl`); deduced from a holder or a shared_ptr.
///
/// Construction is collective. It checks that all ranks have the same model (numbers, names, shapes, types) and
/// options, and throws Mismatch on every rank otherwise, naming the first difference; then all parameters and buffers
/// become rank 0's. Throws InvalidArgument if no parameter requires a gradient, or one is not dense and floating-point;
/// they are in the host's memory or all on one GPU. Parameters that are unfrozen, added, replaced or cast to another
/// type later are taken in by the next forward; the model is compared and made equal again then. One that is added or
/// unfrozen after the forward has begun, and gets a gradient in its backward, is refused there. A cast or move there
/// and back changes nothing. Buffers may be added and replaced.
///
/// The average is that of torch's DistributedDataParallel: the sum of the ranks' gradients over their number. It is the
/// gradient of the mean over all samples where the ranks' batches are equally large and losses are means. For batches
/// that are not, three parts can say how many samples a rank has, and gradients are weighted by that: the sampler
/// (options.sampler), a function of the inputs (options.samples), or `set_sample_count`. Nothing is derived from
/// shapes. A step in which the first dimension of the ranks' inputs differs, and none of the three, is logged once. So
/// are batches of the first two steps that are the same on all ranks, as without a DistributedSampler
/// (COHORT_LOG=batches=off silences that).
///
/// Every backward that reaches a parameter outside of no_sync is averaged, whatever its graph: losses that use
/// parameters outside of forward, penalties, a second backward through a retained graph (of as many samples as the
/// first). It is dropped only where its rank has said that it has 0 samples. After a forward in no_sync, a backward
/// stays local until there is one outside.
///
/// Gradients live in the communicator's memory: after a backward, `.grad()` of each parameter is a tensor over its
/// place in a bucket, which the next backward overwrites. A parameter that no rank used keeps its gradient as it was,
/// undefined or not. Sparse gradients are made dense. Double backward (create_graph) through the reduction is not
/// supported. Until backward() has returned, what `.grad()` holds is not to be read or written: the reduction may be
/// under way, and a gradient of 8 MiB or more is usually not there yet but what an earlier step left, unless the
/// parameter's own gradient accumulator has a hook that comes after it. Hooks on tensors are given the gradients
/// themselves.
///
/// Errors of collectives surface in backward(), forward() and the calls above, as cohort::Error. A backward that ends
/// in an exception of this rank alone (of a layer, of the observer, of memory) leaves the ranks out of step: its next
/// forward, backward or other call says so (Aborted), and nothing of it is averaged with what the others then bring.
template <class M>
class DistributedDataParallel : public DataParallelCore {
 public:
  DistributedDataParallel(std::shared_ptr<M> module, Communicator comm,
                          const DistributedDataParallelOptions& options = {})
      : DataParallelCore(module, std::move(comm), options), module_(std::move(module)) {}
  template <class Holder>
  requires requires(Holder h) {
    { h.ptr() } -> std::convertible_to<std::shared_ptr<M>>;
  }
  DistributedDataParallel(const Holder& holder, Communicator comm, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::shared_ptr<M>(holder.ptr()), std::move(comm), options) {}

  /// The module's forward, synchronising as said above unless in no_sync or in no_grad mode.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    std::vector<at::Tensor> inputs;
    (collect_tensors(args, inputs), ...);
    const bool trains = before_forward(inputs);
    inputs.clear();  // what forward frees early should not be held here
    decltype(auto) output = module_->forward(std::forward<Args>(args)...);
    if (trains) {
      std::vector<at::Tensor> outputs;
      collect_tensors(output, outputs);
      after_forward(outputs);
    }
    return output;
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  const std::shared_ptr<M>& module() const noexcept { return module_; }
  M* operator->() const noexcept { return module_.get(); }

 private:
  std::shared_ptr<M> module_;
};

template <class Holder>
requires requires { typename Holder::ContainedType; }
DistributedDataParallel(const Holder&, Communicator, const DistributedDataParallelOptions& = {})
    ->DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace cohort::nn
