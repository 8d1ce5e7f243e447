// Data-parallel training of a torch::nn::Module: every rank holds a replica and its own part of each batch, and
// backward() leaves the average gradient in every replica's parameters. Owns the gradients' memory, not the
// communicator's world. One thread per rank calls it (forward, backward, join); ranks may be threads of one process.
//
//   cohort::Communicator comm = cohort::init();
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

/// Local accumulation: while a NoSyncGuard lives, forward and backward passes do not communicate. Autograd sums their
/// gradients, their sample counts are added, and the next synchronising backward reduces them together. Scale the
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

  /// The module's parameters, for optimizers and checkpoints: the names have no prefix.
  std::vector<at::Tensor> parameters() const;
  /// Parameters, then buffers, by their names in the module; not copied.
  torch::OrderedDict<std::string, at::Tensor> state_dict() const;
  void train(bool on = true);
  void eval();
  /// Makes all gradients undefined, which is cheapest, since the next backward then writes instead of adding. torch's
  /// own zero_grad, in either form, is just as correct, except with divided gradients (Sharding::Gradients,
  /// Parameters), which torch does not know of.
  void zero_grad();

  /// Sets the number of samples of the next forward with gradients on: the weight of this rank's gradient in the
  /// average over ranks, instead of the number that a sampler or `samples` would give. Call it on all ranks or on none.
  /// With 0, which any rank may give, this rank contributes nothing, and its backward's gradients (NaN, too) are
  /// dropped. Throws InvalidArgument if negative.
  void set_sample_count(std::int64_t samples);

  NoSyncGuard no_sync();

  /// Passes gradients to `hook` instead of averaging them: see <cohort/torch/comm_hooks.h>. Call it once, before the
  /// first backward, with the same hook on all ranks. Throws InvalidArgument otherwise, and with options that rule
  /// hooks out: Sharding::Gradients and Parameters, wire_format, parameters on a GPU. `join` is then refused.
  void register_comm_hook(CommHook hook);

  /// Takes the place of forward and backward on a rank that has no sample, for models that cannot run an empty batch
  /// (BatchNorm): takes part in the buffers' broadcast and all reductions with weight 0, and leaves the others' average
  /// in the gradients. Returns false if no rank had samples; then there are no gradients. So ranks whose inputs end
  /// early can stay in step, optimizer included, until all have ended: `while (model.step_without_samples()) {
  /// optimizer.step(); optimizer.zero_grad(); }`. Not inside no_sync.
  bool step_without_samples();

  /// True after a backward that ended a step and left the average in the gradients. Each one outside of no_sync does
  /// so; with virtual ranks, only that of this rank's last one.
  ///
  ///   loss.backward();
  ///   if (model.step_complete()) { optimizer.step(); model.zero_grad(); }
  ///   sampler.step();
  bool step_complete() const noexcept;
  /// With virtual ranks, call it once for each, after its forward (or step_without_samples), with its mean loss.
  /// Returns nullopt until the last of the step; then it is collective, and returns the mean over all virtual ranks,
  /// weighted by samples, with the same bits on all ranks and for every number of ranks. NaN if no virtual rank had
  /// samples.
  std::optional<double> mean_loss(double loss);

  /// Declares that this rank has no more input: takes part in the others' steps with weight 0 until all ranks have
  /// called `join`. Then ranks that missed steps receive parameters and buffers from the lowest rank among those that
  /// took the most steps (all of these have the same). Call it for each model that the loop trains: it synchronises no
  /// other model. Optimizer states are not sent: if training goes on afterwards, use
  /// `step_without_samples` instead. Returns the rank whose model all ranks now have. Blocks as long as the others
  /// train; the communicator's timeout applies to each single wait. (Python's is a context manager around the loop.)
  int join();

  /// Overwrites all ranks' buffers with rank 0's; collective. Useful before an evaluation spread over the ranks, since
  /// forwards in no_grad mode do not communicate.
  void sync_buffers();

  /// Compares parameters and buffers of all ranks to the bit; collective. Throws Mismatch on every rank if they differ:
  /// see <cohort/torch/same_parameters.h>. Between two forwards that synchronise them, buffers may well differ.
  void require_same_parameters();

  /// With Sharding, call it when all ranks have written the same values to parameters (loaded weights), in place or by
  /// replacing their memory (torch::load); the optimizer then goes on from these values. Collective. Not needed without
  /// Sharding, nor after CheckpointFolder::load_latest(ModelShards).
  void parameters_written();

  /// Rounding errors of this rank's gradients, which are added to the next gradients (`error_feedback`): for each
  /// parameter a flat copy, "residual.NAME"; empty without error feedback. Each rank saves its own by
  /// `CheckpointFolder::save`. Training resumes with the same bits if each host has one rank. (Otherwise not, since the
  /// first step's buckets are those of a new model, and are divided over the ranks differently.)
  std::map<std::string, at::Tensor> residuals() const;
  /// Loads this rank's `residuals()`, or a map that contains them (CheckpointFolder::rank_state); ignores other names,
  /// and sets missing residuals to zero. Throws InvalidArgument for sizes that are not the parameter's. Not collective.
  void load_residuals(const std::map<std::string, at::Tensor>& residuals);

  ReducerStats stats() const;
  /// Location of the gradient of parameter `name`; throws InvalidArgument if there is no such parameter.
  BucketSlot slot_of(const std::string& name) const;

 protected:
  /// Begins a forward pass. Returns false if after_forward need not be called.
  bool before_forward(const std::vector<at::Tensor>& inputs);
  /// Watches the pass's outputs, to notice when a backward begins.
  void after_forward(const std::vector<at::Tensor>& outputs);

 private:
  friend class optim::ShardedCore;
  const std::shared_ptr<Reducer>& reducer() const noexcept;
  const std::shared_ptr<torch::nn::Module>& whole() const noexcept;

  struct State;
  std::unique_ptr<State> state_;
};

/// Calls `visit` with each tensor in what a forward takes or returns: tensors, and optionals, vectors, arrays, pairs
/// and tuples of them, nested to any depth. Other types are skipped.
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
    // Skips ranges of numbers, and types whose elements are of the type itself (a path), which would recurse forever.
    using Item = std::decay_t<decltype(*value.begin())>;
    if constexpr (!std::is_arithmetic_v<Item> && !std::is_same_v<Item, std::remove_const_t<T>>) {
      for (auto&& item : value) visit_tensors(item, visit);
    }
  }
}

/// Appends the defined tensors of `value` to `out`.
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
/// become rank 0's. Throws InvalidArgument if no parameter requires a gradient, or a parameter is not dense and
/// floating-point; parameters are in the host's memory or all on one GPU. The next forward notices parameters that have
/// been unfrozen, added, replaced, resized (set_data) or cast to another type; it compares the model and makes it equal
/// on all ranks again. A parameter that is added or unfrozen after the forward has begun, and gets a gradient in that
/// backward, is refused there. A cast or move that is undone again changes nothing. Buffers may be added and replaced.
///
/// The average is that of torch's DistributedDataParallel: the sum of the ranks' gradients over their number. This is
/// the gradient of the mean over all samples if the ranks' batches are equally large and losses are means. For uneven
/// batches, gradients are weighted by each rank's number of samples. This comes from the sampler (options.sampler), a
/// function of the inputs (options.samples), or `set_sample_count`; never from shapes. If none of the three is used, a
/// step in which the first dimension of the ranks' inputs differs is logged once. Also logged once: batches of the
/// first two steps that are the same on all ranks, as without a DistributedSampler (COHORT_LOG=batches=off silences
/// that).
///
/// Every backward that reaches a parameter outside of no_sync is averaged, for any graph: losses that use parameters
/// outside of forward, penalties, a second backward through a retained graph (with as many samples as the first).
/// Gradients are dropped only on a rank that has declared 0 samples. After a forward in no_sync, backwards stay local
/// until there is a forward outside of no_sync.
///
/// Gradients live in the communicator's memory: after a backward, `.grad()` of each parameter is a tensor over the
/// gradient's place in a bucket, which the next backward overwrites. A parameter that no rank used keeps its gradient
/// as it was, undefined or not. Sparse gradients are made dense. Double backward (create_graph) through the reduction
/// is not supported. Until backward() has returned, do not read or write `.grad()`, since the reduction may be under
/// way, and a `.grad()` of 8 MiB or more usually still holds an earlier step's gradient, unless the parameter's own
/// gradient accumulator has a hook that runs after it. Hooks on tensors receive the gradients themselves.
///
/// Errors of collectives surface in backward(), forward() and the calls above, as cohort::Error. A backward that ends
/// in an exception on this rank only (in a layer, in the observer, for lack of memory) leaves the ranks out of step:
/// the rank's next forward, backward or other call throws Aborted, and none of that backward's gradients are averaged
/// with the others' later ones.
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

  /// Runs the module's forward, synchronising as described above unless in no_sync or in no_grad mode.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    std::vector<at::Tensor> inputs;
    (collect_tensors(args, inputs), ...);
    const bool trains = before_forward(inputs);
    inputs.clear();  // so that forward can free inputs early
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
