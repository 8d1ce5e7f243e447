// Hooks that replace the average over ranks, as in torch's DistributedDataParallel: they define the format in which
// gradients are sent, and the operations. Register one before training, the same on all ranks:
//
//   model.register_comm_hook(cohort::nn::fp16_compress_hook());
//   model.register_comm_hook([](cohort::nn::GradBucket& bucket) {         // the plain mean
//     at::Tensor sum = bucket.buffer();
//     auto work = std::make_shared<cohort::Work>(bucket.communicator().all_reduce(sum));
//     return [=, n = bucket.communicator().size()] { work->wait(); return sum.div_(n); };
//   });
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>
#include <cohort/gradients.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::gradients {
class PowerSGD;
}

namespace cohort::nn {

/// Argument of a hook, like torch.distributed.GradBucket. The gradients are this rank's, in the bucket's own memory; if
/// samples are declared, they are scaled so that the plain mean is the average by samples (no samples: zeros).
class GradBucket {
 public:
  /// A parameter's gradient in the buffer: offset, in elements, and strides.
  struct Part {
    at::Tensor parameter;
    std::string name;
    std::int64_t offset = 0;
    std::vector<std::int64_t> strides;
  };
  GradBucket(std::size_t index, bool is_last, bool last_step_refused, at::Tensor buffer, std::vector<Part> parts,
             Communicator& communicator, std::weak_ptr<const void> model);

  /// Number of the bucket, from 0 in the order in which buckets are ready, the same on all ranks. Buckets are rebuilt
  /// after the first step, and when parameters are unfrozen or replaced.
  std::size_t index() const noexcept { return index_; }
  /// True for the last bucket of this backward.
  bool is_last() const noexcept { return is_last_; }
  /// True if the previous backward ended in an error on all ranks (NonFiniteError, Mismatch): no rank has that step's
  /// gradients, and a hook has to drop everything that it has kept of it.
  bool last_step_refused() const noexcept { return last_step_refused_; }
  /// All gradients, 1-D, with zeros between them. The hook may change it.
  const at::Tensor& buffer() const noexcept { return buffer_; }
  /// Replaces the buffer by another of as many elements, for hooks around hooks.
  void set_buffer(at::Tensor buffer);
  /// Gradients of the parameters, each in its shape, as views of the buffer, with the strides of a dense parameter.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// The parameters' names in the module.
  const std::vector<std::string>& names() const noexcept { return names_; }
  Communicator& communicator() const noexcept { return *communicator_; }
  /// The trained module, by which a state can tell models apart: compare owners, since an address may be reused.
  const std::weak_ptr<const void>& model() const noexcept { return model_; }

 private:
  std::size_t index_;
  bool is_last_;
  bool last_step_refused_;
  at::Tensor buffer_;
  std::vector<Part> parts_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  Communicator* communicator_;
  std::weak_ptr<const void> model_;
};

/// A hook starts operations without waiting, on a thread of autograd. The function that it returns is called once, at
/// the end of the backward and on backward's thread, in the order of buckets. It waits, and returns the average, which
/// has as many elements as the buffer and often is the buffer. The result has to have the same bits on all ranks.
/// backward() throws the hook's errors; that rank is then out of step with the others. Waiting on a Work has the Work's
/// deadline.
using CommHook = std::function<std::function<at::Tensor()>(GradBucket&)>;

// --- hooks provided ---

/// Takes the mean, as without a hook.
CommHook allreduce_hook();
/// Sends gradients as float16; sums are folded in float32 and rounded once. Finite gradients above 65504 become
/// infinite.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

/// State of PowerSGD between steps: see gradients.h. Serves one model: a step of another model throws InvalidArgument,
/// even if the first model has been destroyed. Another DistributedDataParallel may continue with the same module. After
/// a step that was refused on all ranks or whose averages are not finite, the state keeps nothing of that step or of
/// earlier ones.
class PowerSGDState {
 public:
  /// Throws InvalidArgument for values without a meaning.
  explicit PowerSGDState(const PowerSGDOptions& options = {});
  ~PowerSGDState();
  PowerSGDState(const PowerSGDState&) = delete;
  PowerSGDState& operator=(const PowerSGDState&) = delete;

  /// Numbers of elements before compression and after it, in all steps with compression.
  std::pair<std::int64_t, std::int64_t> compression_stats() const;
  /// Returns this rank's state, which differs from other ranks' states; pass it as `state` to CheckpointFolder::save.
  /// Keys have the parameters' names, as "powerSGD.NAME.error", and are the same as Python's.
  std::map<std::string, at::Tensor> state_dict() const;
  /// Loads a state, before training or between two steps, on all ranks. Ignores names that do not begin with
  /// "powerSGD.". Throws InvalidArgument, without changing anything, for a state that `state_dict` cannot have
  /// returned. The next step throws it, naming the parameter, if a gradient has another shape or is missing.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);
  /// Call it if all ranks skip the previous step although its averages were finite, so that the next step does not add
  /// that step's error.
  void drop_residuals();

  gradients::PowerSGD& core() noexcept { return *core_; }
  /// Throws InvalidArgument if this state has served another model.
  void require_one_model(const GradBucket& bucket);

 private:
  std::unique_ptr<gradients::PowerSGD> core_;
  std::optional<std::weak_ptr<const void>> model_;  // nullopt: no model yet
};

/// Sends gradients of two and more dimensions as two thin matrices each. The average is the matrices' product, with the
/// same bits on all ranks, also on different processors; a gradient that is not finite on any rank is NaN on all. All
/// ranks' states have the same options.
CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace cohort::nn
