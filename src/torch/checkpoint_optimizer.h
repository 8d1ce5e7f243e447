// The state of libtorch's optimizers as named tensors: "state/PARAMETER/exp_avg" and "group/0/lr", numbers as tensors
// without dimensions, so that every bit survives. To add an optimizer: describe its options and state
// (checkpoint_optimizer.cpp).
#pragma once

#include "torch/checkpoint_tensors.h"
#include "train/formats/tensor.h"

#include <cohort/torch/torch_api.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace cohort::checkpoint {

struct OptimizerSnapshot {
  Snapshot tensors;
  std::map<std::string, std::string> metadata;  ///< type, names of each group's parameters, options that are text
};

/// Throws InvalidArgument if the optimizer is not one of libtorch's or has parameters that are not the module's.
OptimizerSnapshot snapshot(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

/// What sets the optimizer to the state in the file, once called; it cannot fail any more. Throws InvalidArgument if
/// the file is of another type of optimizer or of other parameters, Corrupt if something is missing or misshapen;
/// nothing is changed then.
std::function<void()> restore(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                              const std::vector<formats::NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata, const std::string& source);

}  // namespace cohort::checkpoint
