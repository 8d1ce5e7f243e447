// The libtorch side of gradient reduction (train/gradients/reducer.h): hooks in autograd that notify the core when a
// backward begins, makes a gradient and ends, and gradients as tensors over their places in the buckets. One thread at
// a time per rank calls a Reducer; autograd calls its hooks on that thread, or, for GPU gradients, on a thread that it
// waits for.
#pragma once

#include <cohort/torch/comm_hooks.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/same_parameters.h>

#include "train/gradients/reducer.h"

#include <cohort/buffer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort {

// Properties of GPU tensors that libtorch's API only offers to code built for CUDA. Any thread.

/// libtorch's current stream on this GPU, in this thread, as a CUstream. Throws Internal if it cannot be found.
void* current_stream(at::Device gpu);
/// Device that the tensor lies on, with the current stream of a GPU. Throws InvalidArgument for memory that is neither
/// the host's nor CUDA's.
Device buffer_device(const at::Tensor& tensor);
/// The kind of device that the tensor lies on, in words that are equal on all ranks: "" or " on cuda".
const char* device_text(const at::Tensor& tensor);

/// Like `require_same_parameters`.
void require_same_tensors(step::Ranks& ranks, const std::vector<NamedTensor>& tensors, std::int64_t step);

}  // namespace cohort

namespace cohort::nn {

class Reducer final : public gradients::Autograd, public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(std::shared_ptr<step::Ranks> ranks, const std::vector<NamedTensor>& parameters,
          const DistributedDataParallelOptions& options, std::shared_ptr<gradients::Shards> shards,
          std::shared_ptr<step::Transaction> transaction);

  /// Part of a parameter that this rank owns, where training state is divided.
  struct Piece {
    gradients::Piece range;
    at::Tensor values;    ///< values in the parameter; 1-D, a leaf
    at::Tensor gradient;  ///< average gradient over the ranks; undefined: there is none
    at::Tensor average;   ///< memory for that average, if gradients are divided
  };
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  /// If gradients are not divided, sets the pieces' gradients from the parameters' gradients.
  void take_gradients();
  /// Drops the gradients of these pieces.
  void drop_gradients(const std::vector<std::size_t>& pieces);
  const std::string& name_of(std::size_t parameter) const { return parameters_[parameter].name; }
  const at::Tensor& tensor_of(std::size_t parameter) const { return parameters_[parameter].tensor; }
  /// Notes that an optimizer steps the pieces.
  void note_optimizer() noexcept { has_optimizer_ = true; }
  /// Number of writes to a parameter not made by the optimizer, as seen by `note_writes`.
  std::int64_t writes_to(std::size_t parameter) const { return parameters_[parameter].writes; }
  /// Note that all writes to parameters so far were legitimate: made by the optimizer, or (note_writes) by others.
  void note_step();
  void note_writes();
  /// Records the parameters' values, and which are frozen, for `changed_parameter`.
  void note_begin() { at_begin_ = shown(); }
  /// Name of a parameter that was changed or frozen since `note_begin`; null if there is none. Values written through
  /// `.data()` are not noticed.
  const std::string* changed_parameter() const;
  /// Moves parameters whose memory was replaced back to their home, with their values, which are equal on all ranks.
  /// Collective.
  void bring_home();
  /// Called before a pass or a step. Throws InvalidArgument, naming the parameter, if its memory was replaced, or if
  /// the user has written to a parameter that ranks share; also if there is no optimizer and nothing else would step.
  void check_parameters(const char* where);

  /// Hooks into autograd. Throws InvalidArgument if another living reducer has done so.
  void attach();
  /// Disables the hooks; another reducer may take the parameters.
  void detach() noexcept;
  /// Called before a forward. When a parameter gets data of another type or device, even temporarily, libtorch makes a
  /// new gradient accumulator without hooks: this adds hooks to it. Returns false if a parameter has another type,
  /// device or size than when it was wrapped.
  bool look_at_parameters();
  /// Sets the parameters that are not reduced, being frozen at wrapping. `drop_all` drops their gradients, too.
  void set_frozen(std::vector<NamedTensor> frozen) { frozen_ = std::move(frozen); }
  /// Sets a function that is called at the end of each backward, with true if it has ended well. The function may
  /// refuse the parameters that the backward has used.
  void after_backward(std::function<void(bool)> check) { after_backward_ = std::move(check); }
  /// Notes that `other` replaces this reducer: no_sync guards of this reducer then apply to `other`.
  void succeed_by(const std::shared_ptr<Reducer>& other) { successor_ = other; }
  std::shared_ptr<Reducer> successor() const { return successor_.lock(); }

  gradients::Reducer& core() noexcept { return core_; }
  /// `comm` has to outlive this reducer.
  void use_hook(CommHook hook, Communicator& comm, const std::weak_ptr<const void>& model);
  /// Watches outputs of a forward, to notice when a backward begins, even one that reaches none of our parameters.
  void watch(const std::vector<at::Tensor>& outputs);

  void take_places() override;
  bool put_in_place(std::size_t parameter) override;
  void give(std::size_t parameter) override;
  void drop(std::size_t parameter) override { parameters_[parameter].tensor.mutable_grad().reset(); }
  void drop_all() override;
  void clear(std::size_t parameter) override;
  void keep(std::size_t parameter) override;
  void put_back(std::size_t parameter) override;
  void drop_kept() override { kept_.clear(); }
  void put_aside() override;
  void call_at_end(std::shared_ptr<void> pass) override;
  std::vector<std::span<const std::byte>> values_of(std::span<const int> parameters) override;
  void compare(std::span<const int> parameters, std::int64_t step) override;
  Memory allocate(const Device& gpu, std::size_t bytes) override;
  void* stream_of(const Device& gpu) override;
  bool are_finite(std::span<const int> parameters) override;
  std::vector<std::byte> copy_to_host(std::size_t parameter) override;

 private:
  friend class BeforeAccumulate;
  friend class AfterAccumulate;
  using VariableList = torch::autograd::variable_list;
  using Node = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  struct Parameter {
    std::string name;
    at::Tensor tensor;
    Node accumulator;                  // autograd holds it, and so its hooks, only weakly
    at::ScalarType type = at::kFloat;  // type when it was wrapped
    at::Device device = at::kCPU;
    std::vector<std::int64_t> sizes = {};
    at::Tensor place;               // place of its gradient; undefined: reduced from where autograd made it
    const void* address = nullptr;  // address of `place`
    at::Tensor bucket;              // the bucket in which `place` lies,
    std::int64_t offset = 0;        // and the place's first element there
    at::Tensor home;                // memory of its values, if training state is divided
    std::int64_t version = 0;       // version of `tensor`; autograd counts changes in place
    std::int64_t writes = 0;
  };

  void move_parameters();
  void hook_node(std::size_t index);
  static void make_place(Parameter& parameter);
  const at::Tensor& place(std::size_t index);
  void read_from_gradient(std::size_t index, const at::Tensor& gradient);
  VariableList before_accumulate(std::size_t index, const VariableList& gradients);
  void after_accumulate(std::size_t index);
  bool accumulates() const;
  /// Properties by which a change of a parameter is noticed.
  struct Shown {
    std::int64_t version = 0;
    const void* data = nullptr;
    bool requires_grad = false;
    friend bool operator==(const Shown&, const Shown&) = default;
  };
  std::vector<Shown> shown() const;

  std::shared_ptr<step::Ranks> ranks_;
  std::vector<Parameter> parameters_;
  std::vector<NamedTensor> frozen_;
  std::vector<Shown> at_begin_;  // of a step
  std::vector<Piece> pieces_;
  bool has_optimizer_ = false;
  bool detached_ = false;
  std::weak_ptr<Reducer> successor_;
  std::function<void(bool)> after_backward_;
  std::map<std::size_t, at::Tensor> kept_;
  gradients::Reducer core_;
};

}  // namespace cohort::nn
