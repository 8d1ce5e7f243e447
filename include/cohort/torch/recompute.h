// Recomputation of activations, which saves memory and costs time. A part of a model does not keep its intermediate
// results for the backward; the backward runs that part again.
//
//   for (auto& block : blocks) x = cohort::nn::checkpoint([&](const at::Tensor& h) { return block(h); }, x);
#pragma once

#include <cohort/torch/nn.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cohort::nn {

/// True if this thread runs a function of `checkpoint` again, in a backward. Code that counts forwards skips these.
bool recomputing() noexcept;

namespace detail {
/// Function of a flat list of tensors.
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs);
}  // namespace detail

/// Returns the result of `function(inputs...)`, and keeps only the inputs between forward and backward. Inputs and
/// outputs are tensors, and optionals, vectors, arrays, pairs and tuples of them, nested to any depth; inputs of other
/// types are passed as copies.
///
/// Gradients of the inputs, of parameters, and of other tensors that the function uses are to the bit those without
/// recomputation, with two exceptions. If a tensor is used several times in the function and also outside, the
/// function's share is one term of the sum. Under autocast, a weight used in several functions is cast in each; without
/// recomputation it is cast once, and its gradients are summed in 16 bits. Each gradient arrives once, so
/// DistributedDataParallel, hooks and shared parameters work as usual. autograd::grad works, and so do nested
/// checkpoints (with collectives, too, if all ranks do the same). In no_grad mode this is a plain call.
///
/// The function has to do the same in both runs. The second run has the first run's random state (of the CPU's
/// generator, and those of the GPUs that inputs lie on), so that dropout repeats, and its autocast state. (Ranks that
/// are threads disturb each other, since a process has one CPU generator.) Buffers that the function changes, such as
/// running statistics of torch's BatchNorm, are changed twice (SyncBatchNorm's are not). The function is kept until the
/// backward: objects it refers to have to live as long. The backward throws InvalidArgument if the runs differ, if a
/// parameter was changed in between, and for double backward (create_graph).
template <class Function, class... Inputs>
auto checkpoint(Function function, Inputs... inputs) {
  using Output = std::decay_t<std::invoke_result_t<Function&, Inputs&...>>;
  std::vector<at::Tensor> given;
  auto arguments = std::make_tuple(std::move(inputs)...);
  visit_tensors(arguments, [&](at::Tensor& tensor) { given.push_back(std::exchange(tensor, {})); });

  const auto result = std::make_shared<std::optional<Output>>();  // result of the first run
  auto flat = [function = std::move(function), arguments = std::move(arguments),
               first = std::weak_ptr(result)](const std::vector<at::Tensor>& tensors) mutable {
    auto with_tensors = arguments;
    std::size_t at = 0;
    visit_tensors(with_tensors, [&](at::Tensor& tensor) { tensor = tensors[at++]; });
    Output output = std::apply(function, with_tensors);
    std::vector<at::Tensor> outputs;
    visit_tensors(output, [&](at::Tensor& tensor) { outputs.push_back(tensor); });
    if (const auto slot = first.lock()) slot->emplace(std::move(output));
    return outputs;
  };
  const std::vector<at::Tensor> outputs = detail::checkpoint(std::move(flat), given);
  Output output = *std::move(*result);
  std::size_t at = 0;
  visit_tensors(output, [&](at::Tensor& tensor) { tensor = outputs[at++]; });
  return output;
}

}  // namespace cohort::nn
