// Autograd's side of a gradient's way (train/gradients/reducer.h): hooks of libtorch that tell the core when a backward
// begins, brings a gradient and ends, and gradients as tensors over their places in the buckets. One thread at a time
// per rank calls it; autograd calls its hooks on that one, or, for a GPU's gradients, on one that that one waits for.
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
#include <vector>

namespace cohort {

// Properties of a GPU's tensors that libtorch does not tell without being built for CUDA. Any thread.

/// As a CUstream: the one in which libtorch works on this GPU now, in this thread. Throws Internal where it cannot be
/// told.
void* current_stream(at::Device gpu);
/// Device that the tensor lies on, with the current stream of a GPU. Throws InvalidArgument for memory that is neither
/// the host's nor CUDA's.
Device buffer_device(const at::Tensor& tensor);
/// The same of a kind of device, in words that are equal on all ranks: "" or " on cuda".
const char* device_text(const at::Tensor& tensor);

/// As `require_same_parameters`.
void require_same_tensors(step::Ranks& ranks, const std::vector<NamedTensor>& tensors, std::int64_t step);

}  // namespace cohort

namespace cohort::nn {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

class Reducer final : public gradients::Autograd, public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(std::shared_ptr<step::Ranks> ranks, const std::vector<NamedParameter>& parameters,
          const DistributedDataParallelOptions& options, std::shared_ptr<gradients::Shards> shards,
          std::shared_ptr<step::Transaction> transaction);

  /// Part of a parameter that this rank owns, where training state is divided.
  struct Piece {
    gradients::Piece range;
    at::Tensor values;    ///< in the parameter, 1-D, a leaf
    at::Tensor gradient;  ///< its average over the ranks; undefined: there is none
    at::Tensor average;   ///< where the reduction leaves it, if gradients are divided
  };
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  /// Their gradients become those of the parameters, where these are not divided.
  void take_gradients();
  /// Drops the gradients of these pieces.
  void drop_gradients(const std::vector<std::size_t>& pieces);
  const std::string& name_of(std::size_t parameter) const { return parameters_[parameter].name; }
  const at::Tensor& tensor_of(std::size_t parameter) const { return parameters_[parameter].tensor; }
  /// An optimizer steps the pieces.
  void note_optimizer() noexcept { has_optimizer_ = true; }
  /// How often a parameter was written to by others than the optimizer, as far as `note_writes` has seen.
  std::int64_t writes_to(std::size_t parameter) const { return parameters_[parameter].writes; }
  /// The parameters' values are as they should be: the optimizer's, or others'.
  void note_step();
  void note_writes();
  /// Parameters that were given memory of their own get their home's back, with their values. Collective, for values
  /// that are equal on all ranks.
  void bring_home();
  /// Before a pass or a step. Throws InvalidArgument, which names it, for a parameter that was given other memory, and
  /// if the user has written to one that ranks share; and without an optimizer, where nothing else would step.
  void check_parameters(const char* where);

  /// Hooks into autograd. Throws InvalidArgument if another living reducer has done so.
  void attach();
  /// Its hooks do nothing any more, and another may take the parameters.
  void detach() noexcept { detached_ = true; }
  /// Before a forward. libtorch makes a new gradient accumulator, without hooks, when a parameter is given data of
  /// another type or device, also there and back: those are hooked in. False: one has another type or device than when
  /// it was wrapped.
  bool look_at_parameters();
  /// Called at the end of each backward that has ended well: it may refuse what that has used.
  void after_backward(std::function<void()> check) { after_backward_ = std::move(check); }
  /// Another reducer has taken its place; no_sync guards that hold this one mean that one.
  void succeed_by(const std::shared_ptr<Reducer>& other) { successor_ = other; }
  std::shared_ptr<Reducer> successor() const { return successor_.lock(); }

  gradients::Reducer& core() noexcept { return core_; }
  /// `comm` outlives this.
  void use_hook(CommHook hook, Communicator& comm, const std::weak_ptr<const void>& model);
  /// Outputs of a forward tell when a backward begins, also one that then reaches none of our parameters.
  void watch(const std::vector<at::Tensor>& outputs);

  void take_places() override;
  bool put_in_place(std::size_t parameter) override;
  void give(std::size_t parameter) override;
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
    Node accumulator;                  // autograd holds it only weakly, and the hooks with it
    at::ScalarType type = at::kFloat;  // of what it was wrapped with
    at::Device device = at::kCPU;
    at::Tensor place;               // of its gradient; undefined: it is reduced from where autograd made it
    const void* address = nullptr;  // of that
    at::Tensor bucket;              // in which it lies,
    std::int64_t offset = 0;        // and at which element
    at::Tensor home;                // where its values lie, if training state is divided
    std::int64_t version = 0;       // of it, as autograd counts changes in place
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

  std::shared_ptr<step::Ranks> ranks_;
  std::vector<Parameter> parameters_;
  std::vector<Piece> pieces_;
  bool has_optimizer_ = false;
  bool detached_ = false;
  std::weak_ptr<Reducer> successor_;
  std::function<void()> after_backward_;
  std::map<std::size_t, at::Tensor> kept_;
  gradients::Reducer core_;
};

}  // namespace cohort::nn
