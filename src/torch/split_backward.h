// A backward in two parts, for any graph: first the gradient of one input, then those of all other leaves, each node
// of the graph worked off once for what it is needed for. One thread at a time.
#pragma once

#include <cohort/torch/torch_api.h>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace cohort::nn {

class SplitBackward {
 public:
  /// The gradient of `input`, a leaf; undefined where `output` does not depend on it. `gradient` is that of `output`,
  /// undefined: one. Throws InvalidArgument for what cannot be split: see the source.
  at::Tensor of_input(const at::Tensor& output, const at::Tensor& gradient, const at::Tensor& input);
  /// The gradients of all other leaves, added to what they have, as a backward does it. Once.
  void of_parameters();

 private:
  /// Remaining work from some nodes whose gradients are known.
  struct Part {
    std::vector<torch::autograd::Edge> roots;
    torch::autograd::variable_list gradients;
    std::vector<torch::autograd::Edge> leaves;  ///< those to come to; empty: all
  };
  std::vector<Part> parts_;
};

}  // namespace cohort::nn
