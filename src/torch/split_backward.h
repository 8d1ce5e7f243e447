// A backward in two parts, for any graph: first the gradient of one input, then the gradients of all other leaves. Each
// node of the graph is run once for each part that needs it. One thread at a time.
#pragma once

#include <cohort/torch/torch_api.h>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace cohort::nn {

class SplitBackward {
 public:
  /// Returns the gradient of `input`, a leaf; undefined if `output` does not depend on it. `gradient` is the gradient
  /// of `output`; undefined: 1. Throws InvalidArgument for graphs that cannot be split: see the source.
  at::Tensor of_input(const at::Tensor& output, const at::Tensor& gradient, const at::Tensor& input);
  /// Adds the gradients of all other leaves to their existing ones, as a backward does. Call it once.
  void of_parameters();

 private:
  /// Remaining work from some nodes whose gradients are known.
  struct Part {
    std::vector<torch::autograd::Edge> roots;
    torch::autograd::variable_list gradients;
    std::vector<torch::autograd::Edge> leaves;  ///< leaves to reach; empty: all
  };
  std::vector<Part> parts_;
};

}  // namespace cohort::nn
