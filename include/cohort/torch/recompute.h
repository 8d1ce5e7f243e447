// Recomputation of activations: memory for time. What a part of a model makes on its way is not kept for the backward;
// the backward runs that part once more.
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

/// Whether this thread runs a function of `checkpoint` once more, in a backward: what counts forwards leaves these out.
bool recomputing() noexcept;

namespace detail {
/// Function of a flat list of tensors.
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs);
}  // namespace detail

/// Returns what `function(inputs...)` returns; between forward and backward only the inputs are kept. Inputs and
/// outputs are tensors, and optionals, vectors, arrays, pairs and tuples of them, nested as may be; inputs of other
/// types are passed on, as copies.
///
/// Gradients are those without it, of the inputs, of parameters, and of other tensors that the function reaches; to the
/// bit, unless a tensor is used several times in the function and outside of it, too: then the function's share is one
/// term of the sum; or, under autocast, in several functions: without recomputation autocast casts a weight once, so
/// that its gradients are summed in 16 bits. Each arrives once, so DistributedDataParallel, hooks and shared parameters
/// see nothing of it. autograd::grad works, and so do checkpoints within a function (of collectives, too, on all ranks
/// alike). In no_grad mode it is a plain call.
///
/// The function has to do the same twice. It is run with the random state of the first time (of the CPU's generator,
/// and those of the GPUs that inputs lie on), so that dropout repeats, and with its autocast state. (torch's CPU
/// generator is one per process: ranks that are threads disturb each other's.) Buffers that it changes are changed
/// twice, as the running statistics of torch's BatchNorm; not those of SyncBatchNorm. It is kept until the backward has
/// come: what it refers to has to live as long. Throws InvalidArgument in the backward if what it did differs, if a
/// parameter was changed in between, and for double backward (create_graph).
template <class Function, class... Inputs>
auto checkpoint(Function function, Inputs... inputs) {
  using Output = std::decay_t<std::invoke_result_t<Function&, Inputs&...>>;
  std::vector<at::Tensor> given;
  auto arguments = std::make_tuple(std::move(inputs)...);
  visit_tensors(arguments, [&](at::Tensor& tensor) { given.push_back(std::exchange(tensor, {})); });

  const auto result = std::make_shared<std::optional<Output>>();  // of the first run
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
