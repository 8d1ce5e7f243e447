// Converts between libtorch's tensors and tensors in files. Functions own nothing once they return; a Snapshot owns its
// copies.
#pragma once

#include "train/formats/tensor.h"

#include <cohort/torch/checkpoint.h>
#include <cohort/torch/torch_api.h>

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cohort::checkpoint {

/// Throws InvalidArgument for types that files, or this libtorch, do not have.
formats::ElementType to_element_type(at::ScalarType type);
at::ScalarType to_scalar_type(formats::ElementType type, const std::string& name);

/// Tensors as bytes: views of tensors that are dense and on the CPU, copies of others.
class Snapshot {
 public:
  void add(std::string name, const at::Tensor& tensor);
  const std::vector<formats::NamedTensor>& tensors() const noexcept { return tensors_; }

 private:
  std::vector<at::Tensor> owned_;
  std::vector<formats::NamedTensor> tensors_;
};

/// Returns the reason why the tensor cannot be written: several of its elements share memory (expand), or it was made
/// in inference mode. Empty if it can be written.
std::string unwritable(const at::Tensor& tensor);
/// Throws InvalidArgument for a module's tensor that could be saved, but not loaded again.
void require_loadable(const std::string& name, const at::Tensor& tensor);

/// A copy of a file's tensor.
at::Tensor to_tensor(const formats::TensorView& view, const std::string& name);

/// Parameters and buffers by name, not copied. A parameter registered twice has two names, as in Python.
std::map<std::string, at::Tensor> named_tensors(const torch::nn::Module& module);

/// Generators that a rank draws from: "cpu"; for the GPUs that the module is on, by ascending index, "cuda/0", ...
std::vector<std::pair<std::string, at::Generator>> generators_of(const torch::nn::Module& module);
at::Tensor state_of(at::Generator& generator);

/// Copies to be made when all tensors are known to fit.
struct Assignment {
  struct Copy {
    at::Tensor to;
    formats::TensorView from;
    std::string name;
  };
  std::vector<Copy> copies;
  LoadedWeights report;
  /// Overwrites the tensors.
  void apply() const;
};

/// Pairs a file's weights with tensors. Throws InvalidArgument with all differences; `source` is the file's name.
Assignment match(const std::map<std::string, at::Tensor>& tensors, const std::vector<formats::NamedTensor>& weights,
                 const std::string& source, const LoadWeightsOptions& options);

/// The state of libtorch's optimizers as named tensors: "state/PARAMETER/exp_avg" and "group/0/lr", numbers as tensors
/// without dimensions, so that every bit survives. To add an optimizer: describe its options and state
/// (checkpoint_optimizer.cpp).
struct OptimizerSnapshot {
  Snapshot tensors;
  std::map<std::string, std::string> metadata;  ///< type, names of each group's parameters, options that are text
};

/// Names of an optimizer's parameters, by their `unsafeGetTensorImpl()`.
using ParameterNames = std::unordered_map<const void*, std::string>;
ParameterNames names_of(const torch::nn::Module& module);
/// Names of each group's parameters. Throws InvalidArgument for a parameter that has no name.
std::vector<std::vector<std::string>> group_members(const torch::optim::Optimizer& optimizer,
                                                    const ParameterNames& names);
/// The groups as text, for metadata.
std::string groups_text(const std::vector<std::vector<std::string>>& groups);
std::vector<std::vector<std::string>> parse_groups(const std::string& text);

/// Throws InvalidArgument if the optimizer is not one of libtorch's or has parameters without a name.
OptimizerSnapshot snapshot(const torch::optim::Optimizer& optimizer, const ParameterNames& names);
inline OptimizerSnapshot snapshot(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  return snapshot(optimizer, names_of(module));
}

/// The options of the optimizer's groups, one per line, for comparing with other ranks; only the learning rates if the
/// optimizer is not libtorch's.
std::vector<std::string> option_lines(const torch::optim::Optimizer& optimizer);

/// Returns a function that sets the optimizer to the state in the file; that function cannot fail. Throws
/// InvalidArgument if the file is of another optimizer type or has other parameters, Corrupt if something is missing or
/// misshapen; changes nothing.
std::function<void()> restore(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                              const std::vector<formats::NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata, const std::string& source);
inline std::function<void()> restore(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                                     const std::vector<formats::NamedTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata, const std::string& source) {
  return restore(optimizer, names_of(module), tensors, metadata, source);
}

/// Ends the name of master weights, as "state/fc.weight/master": float32 values of a 16-bit parameter. Only sharded
/// optimizers have master weights.
inline constexpr std::string_view kMasterField = "/master";

}  // namespace cohort::checkpoint
