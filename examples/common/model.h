// The network: that of PyTorch's MNIST example, without its dropout, so that a run depends on nothing but its weights
// and its data, and runs of one and of many processes can be compared.
#pragma once

#include <cohort/torch/torch_api.h>

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

/// Images [n, 1, 28, 28] to logarithms of probabilities [n, 10].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  at::Tensor forward(at::Tensor x) {
    x = torch::relu(conv1(x));
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    x = torch::relu(fc1(x.flatten(1)));
    return torch::log_softmax(fc2(x), 1);
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 32, 3)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(32, 64, 3)};
  torch::nn::Linear fc1{64 * 12 * 12, 128};
  torch::nn::Linear fc2{128, 10};
};
TORCH_MODULE(Net);
