// Hooks in the place of the average over ranks, as torch's DistributedDataParallel has them: what gradients travel as,
// and by which operations. Register one before training, the same on all ranks:
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

/// Argument of a hook, as torch.distributed.GradBucket. The gradients are this rank's, in the bucket's own memory;
/// where samples are declared they have been multiplied so that the plain mean over ranks is the average by samples (a
/// rank without samples has zeros).
class GradBucket {
 public:
  /// A parameter's gradient in the buffer: where it begins, in elements, and how it lies there.
  struct Part {
    at::Tensor parameter;
    std::string name;
    std::int64_t offset = 0;
    std::vector<std::int64_t> strides;
  };
  GradBucket(std::size_t index, bool is_last, bool last_step_refused, at::Tensor buffer, std::vector<Part> parts,
             Communicator& communicator, std::weak_ptr<const void> model);

  /// Number of the bucket, from 0 in the order in which buckets come, the same on all ranks. Buckets are made anew
  /// after the first step, and where parameters are unfrozen or replaced.
  std::size_t index() const noexcept { return index_; }
  /// True for the last bucket of this backward.
  bool is_last() const noexcept { return is_last_; }
  /// The backward before this one ended in an error on all ranks (NonFiniteError, Mismatch): nobody has its gradients,
  /// and what a hook has kept of it is to be dropped.
  bool last_step_refused() const noexcept { return last_step_refused_; }
  /// All gradients, 1-D, with zeros between them. The hook may change it.
  const at::Tensor& buffer() const noexcept { return buffer_; }
  /// Another one of as many elements, for hooks around hooks.
  void set_buffer(at::Tensor buffer);
  /// Gradients of the parameters, each in its shape, as views of the buffer, with the strides of a dense parameter.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// The parameters' names in the module.
  const std::vector<std::string>& names() const noexcept { return names_; }
  Communicator& communicator() const noexcept { return *communicator_; }
  /// The module that is trained, for states that are one model's: by its owner, whatever lives at its address later.
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

/// Starts operations and does not wait, on a thread of autograd. What it returns is called once, at the end of the
/// backward and on its thread, in the order of buckets: it waits, and returns the average, of as many elements as the
/// buffer, often the buffer itself. The result has to be the same bits on all ranks. Errors are backward()'s, whose
/// rank is out of step with the others then. Waiting on a Work has the Work's deadline.
using CommHook = std::function<std::function<at::Tensor()>(GradBucket&)>;

// --- hooks that there are ---

/// The mean, as without a hook.
CommHook allreduce_hook();
/// As float16, folded in float32 and rounded once. Finite gradients above 65504 are infinite then.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

/// State of PowerSGD between steps: see gradients.h. For one model: the first step of another one throws
/// InvalidArgument, also where the first one is gone. Another DistributedDataParallel may take the same module over.
/// Nothing is kept of a step that was refused on all ranks or whose averages are not finite, nor of those before it.
class PowerSGDState {
 public:
  /// Throws InvalidArgument for values that mean nothing.
  explicit PowerSGDState(const PowerSGDOptions& options = {});
  ~PowerSGDState();
  PowerSGDState(const PowerSGDState&) = delete;
  PowerSGDState& operator=(const PowerSGDState&) = delete;

  /// Elements that were to be sent and that were, in all steps with compression.
  std::pair<std::int64_t, std::int64_t> compression_stats() const;
  /// State of this rank, which differs from that of others: for `state` of CheckpointFolder::save, as
  /// "powerSGD.NAME.error" and so on by the parameters' names, the same as Python's.
  std::map<std::string, at::Tensor> state_dict() const;
  /// Before training or between two steps, on all ranks. Nothing is taken from names that do not begin with
  /// "powerSGD.". Throws InvalidArgument, and changes nothing, for what `state_dict` cannot have given; the next step
  /// throws it, and names the parameter, where a gradient has another shape or does not come.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);
  /// All ranks skip the step before, whose averages were finite: nothing of it comes with the next one.
  void drop_residuals();

  gradients::PowerSGD& core() noexcept { return *core_; }
  /// Throws InvalidArgument where it has served another one.
  void require_one_model(const GradBucket& bucket);

 private:
  std::unique_ptr<gradients::PowerSGD> core_;
  std::optional<std::weak_ptr<const void>> model_;  // none: it has served nobody
};

/// Gradients of two and more dimensions travel as two thin matrices each. Averages are those matrices' product, the
/// same bits on all ranks, whatever their processors; a gradient that is not finite on any rank is NaN on all. All
/// ranks' states have the same options.
CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace cohort::nn
