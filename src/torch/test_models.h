// Models and one-process references for the tests of DistributedDataParallel.
#pragma once

#include <cohort/torch/nn.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace cohort::testing {

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(at::ScalarType type = at::kDouble, std::int64_t hidden = 17) {
    first = register_module("first", torch::nn::Linear(5, hidden));
    second = register_module("second", torch::nn::Linear(hidden, hidden));
    last = register_module("last", torch::nn::Linear(hidden, 3));
    to(type);
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(second(at::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(Mlp);

/// Buckets of about two tensors, so that small models have several.
inline nn::DistributedDataParallelOptions small_buckets() { return {.bucket_bytes = 1200, .first_bucket_bytes = 300}; }

/// Values that depend only on the shape and `salt`, since all threads of the process share torch's generator.
inline at::Tensor pattern(at::IntArrayRef sizes, double salt, at::ScalarType type = at::kDouble) {
  std::int64_t elements = 1;
  for (const std::int64_t size : sizes) elements *= size;
  return at::sin(at::arange(elements, at::kDouble) * 1.7 + salt).reshape(sizes).to(type);
}

/// Options for averages by samples, which are the first input's rows.
inline nn::DistributedDataParallelOptions by_rows(nn::DistributedDataParallelOptions options = {}) {
  options.samples = [](const std::vector<at::Tensor>& inputs) { return inputs.front().size(0); };
  return options;
}

template <class Holder>
Holder with_values(Holder net, double salt) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : net->parameters()) {
    parameter.copy_(pattern(parameter.sizes(), salt, parameter.scalar_type()) * 0.5);
    salt += 1;
  }
  return net;
}

inline at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) { return at::mse_loss(output, target); }

/// The global batch of a step: `samples` rows.
struct Batch {
  at::Tensor x, y;
};
inline Batch batch_of(int step, std::int64_t samples, at::ScalarType type = at::kDouble) {
  return {pattern({samples, 5}, step * 10.0, type), pattern({samples, 3}, step * 10.0 + 5, type)};
}

inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

inline void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i], b[i], tolerance, tolerance)) << "tensor " << i << ": " << (a[i] - b[i]).abs().max();
  }
}

inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

/// All parameters, each number exactly.
template <class Module>
std::string text_of(const Module& module) {
  std::string text;
  for (const at::Tensor& parameter : module.parameters()) {
    const at::Tensor flat = parameter.detach().to(at::kDouble).contiguous();
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      char digits[40];
      std::snprintf(digits, sizeof digits, "%.17g ", flat.data_ptr<double>()[i]);
      text += digits;
    }
  }
  return text;
}

inline std::vector<double> numbers_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<double>(in), {}};
}

}  // namespace cohort::testing
