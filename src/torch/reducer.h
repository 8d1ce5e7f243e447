// Autograd's side of a gradient's way (train/gradients/reducer.h): hooks of libtorch that tell the core when a backward
// begins, brings a gradient and ends, and gradients as tensors over their places in the buckets. One thread at a time
// per rank calls it; autograd calls its hooks on that one, or, for a GPU's gradients, on one that that one waits for.
#pragma once

#include <cohort/torch/nn.h>
#include <cohort/torch/same_parameters.h>

#include "train/gradients/reducer.h"

#include <cohort/buffer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort {

// What of a GPU's tensors libtorch does not say without being built for CUDA. Any thread.

/// As a CUstream: the one in which libtorch works on this GPU now, in this thread. Throws Internal where it cannot be
/// told.
void* current_stream(at::Device gpu);
/// Where the tensor lies, with the current stream of a GPU. Throws InvalidArgument for what is neither the host's
/// memory nor CUDA's.
Device buffer_device(const at::Tensor& tensor);
/// The same of a kind of device, in words that are equal on all ranks: "" or " on cuda".
const char* device_text(const at::Tensor& tensor);

/// As `require_same_parameters`.
void require_same_tensors(gradients::Ranks& ranks, const std::vector<NamedTensor>& tensors, std::int64_t step);

}  // namespace cohort

namespace cohort::nn {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

class Reducer final : public gradients::Autograd, public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(std::shared_ptr<gradients::Ranks> ranks, const std::vector<NamedParameter>& parameters,
          const DistributedDataParallelOptions& options);

  /// Hooks into autograd. Throws InvalidArgument if another living reducer has done so.
  void attach();

  gradients::Reducer& core() noexcept { return core_; }
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
    Node accumulator;  // autograd holds it only weakly, and the hooks with it
    at::Tensor place;  // of its gradient
  };

  VariableList before_accumulate(std::size_t index, const VariableList& gradients);
  void after_accumulate(std::size_t index);
  bool accumulates() const;

  std::shared_ptr<gradients::Ranks> ranks_;
  std::vector<Parameter> parameters_;
  std::map<std::size_t, at::Tensor> kept_;
  gradients::Reducer core_;
};

}  // namespace cohort::nn
