#include "torch/pipeline_layers.h"

#include "base/result.h"
#include "train/step/agreement.h"
#include "train/step/ranks.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <random>
#include <span>
#include <unordered_map>
#include <unordered_set>

namespace cohort::nn {

// ------------------------------------------------------------------------------------------------- random numbers

GeneratorStates::GeneratorStates(at::Device device) {
  take(at::Device(at::kCPU));
  if (device.is_cuda() && at::globalContext().hasCUDA()) take(device);
}

GeneratorStates::~GeneratorStates() {
  for (auto& [generator, state] : kept_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

void GeneratorStates::seed(std::uint64_t seed) {
  for (auto& [generator, state] : kept_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

void GeneratorStates::take(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  kept_.emplace_back(generator, generator.get_state());
}

std::uint64_t mixed_seed(std::uint64_t seed, std::initializer_list<std::int64_t> numbers) {
  std::vector<std::uint64_t> all = {seed, seed >> 32};  // only the lower half of each is used
  all.insert(all.end(), numbers.begin(), numbers.end());
  std::seed_seq sequence(all.begin(), all.end());  // the same on all platforms, by the C++ standard
  std::array<std::uint32_t, 2> words{};
  sequence.generate(words.begin(), words.end());
  return std::uint64_t{words[0]} << 32 | words[1];
}

// ------------------------------------------------------------------------------------------------- single layers

std::optional<at::Device> device_of(const torch::nn::Module& module) {
  const std::vector<at::Tensor> parameters = module.parameters();
  return parameters.empty() ? std::nullopt : std::optional(parameters.front().device());
}

namespace {

// Returns detach() instead of the tensor itself, since autograd would return a view that must not be changed in place.
struct PassedOn : torch::autograd::Function<PassedOn> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->set_materialize_grads(false);
    return x.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

/// Keeps the gradients and buffers of a module, since running the module changes them.
class BeforeMeasuring {
 public:
  explicit BeforeMeasuring(const torch::nn::Module& module) {
    for (const at::Tensor& buffer : module.buffers()) buffers_.emplace_back(buffer, buffer.detach().clone());
    for (at::Tensor& parameter : module.parameters()) {
      gradients_.emplace_back(parameter, parameter.grad());
    }
    // Needs a separate loop, since a parameter may be listed twice.
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad().reset();
  }
  void put_back() {
    const at::NoGradGuard no_grad;
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
    for (auto& [buffer, value] : buffers_) buffer.copy_(value);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_, gradients_;
};

/// Returns the time of the fastest of some runs. `output` gets the layer's output for `input`.
double measured_cost(torch::nn::AnyModule& module, const at::Tensor& input, at::Tensor& output) {
  constexpr int kRepeats = 3;
  const auto finish = [](const at::Tensor& tensor) {
    if (tensor.is_cuda()) static_cast<void>(tensor.flatten()[0].cpu());
  };
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) {
    at::Tensor x = input.detach().clone();
    if (x.is_floating_point()) x.requires_grad_(true);
    finish(x);
    const auto begin = std::chrono::steady_clock::now();
    output = module.forward(passed_on(x));
    if (output.requires_grad()) torch::autograd::backward({output}, {at::ones_like(output)});
    finish(x.grad().defined() ? x.grad() : output);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace

at::Tensor passed_on(const at::Tensor& leaf) { return leaf.requires_grad() ? PassedOn::apply(leaf) : leaf; }

std::vector<double> measured_costs(const std::vector<NamedLayer>& layers, const at::Tensor& sample) {
  const at::AutoGradMode grad_mode(true);
  const GeneratorStates states(sample.device());
  std::vector<double> costs;
  at::Tensor input = sample.detach();
  for (const NamedLayer& layer : layers) {
    torch::nn::AnyModule module = layer.get();
    BeforeMeasuring before(*module.ptr());
    at::Tensor output;
    try {
      costs.push_back(measured_cost(module, input, output));
    } catch (...) {
      before.put_back();
      throw;
    }
    before.put_back();
    input = output.detach();
  }
  return costs;
}

// ------------------------------------------------------------------------------------------------- all layers

namespace {

struct OneTensor {
  std::string name;
  at::Tensor tensor;
  bool is_buffer = false;
};

std::vector<OneTensor> layer_tensors(const torch::nn::AnyModule& layer) {
  std::vector<OneTensor> all;
  for (const auto& item : layer.ptr()->named_parameters()) {
    if (item.value().defined()) all.push_back({item.key(), item.value(), false});
  }
  for (const auto& item : layer.ptr()->named_buffers()) {
    if (item.value().defined()) all.push_back({item.key(), item.value(), true});
  }
  return all;
}

torch::nn::AnyModule made_layer(const NamedLayer& layer) {
  torch::nn::AnyModule module = layer.get();
  if (module.is_empty() || module.ptr() == nullptr) {
    raise(ErrorCode::InvalidArgument, "Pipeline: layer {} is made by a function that returns no module", layer.name);
  }
  return module;
}

/// True if the function returns an object it refers to, or a part of that, instead of a new one each time.
bool gives_the_same_again(const NamedLayer& layer, const torch::nn::AnyModule& first) {
  const GeneratorStates states(device_of(*first.ptr()).value_or(at::Device(at::kCPU)));
  std::unordered_set<const void*> known;
  for (const OneTensor& one : layer_tensors(first)) known.insert(one.tensor.unsafeGetTensorImpl());
  if (known.empty()) return false;
  try {
    for (const OneTensor& one : layer_tensors(made_layer(layer))) {
      if (known.count(one.tensor.unsafeGetTensorImpl()) > 0) return true;
    }
  } catch (const std::exception&) {  // it gave away its only object, so no other layer can have that
  }
  return false;
}

/// Finds tensors that are in layers of two stages. Keeps their addresses, not the tensors.
class SharedTensors {
 public:
  void add(const std::string& layer, int stage, const torch::nn::AnyModule& module) {
    for (const OneTensor& one : layer_tensors(module)) {
      const std::string name = layer + "." + one.name;
      const auto [found, is_new] = owners_.try_emplace(one.tensor.unsafeGetTensorImpl(), stage, name);
      if (is_new) addresses_.emplace_back(one.tensor.getIntrusivePtr());
      const auto& [owner, first] = found->second;
      if (owner == stage) continue;
      problems_.push_back(fmt::format("{} '{}' of stage {} is '{}' of stage {} as well",
                                      one.is_buffer ? "buffer" : "parameter", name, stage, first, owner));
    }
  }
  const std::vector<std::string>& problems() const noexcept { return problems_; }

 private:
  std::unordered_map<const void*, std::pair<int, std::string>> owners_;  // stage and name
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> addresses_;
  std::vector<std::string> problems_;
};

}  // namespace

// A rank makes only its own layers. If two functions refer to one module, two stages would each get and train a copy of
// it. So the rank that keeps a layer reports whether its function makes a new module, and all ranks call the functions
// that do not.
std::vector<torch::nn::AnyModule> made_layers(Communicator& comm, const std::vector<NamedLayer>& layers,
                                              const std::vector<int>& stages, std::optional<std::uint64_t> seed) {
  std::vector<torch::nn::AnyModule> own(layers.size());
  std::vector<std::int64_t> facts(layers.size() + 1, 0);  // by layer: 1 if it exists; then a failed rank, from 1
  const auto is_own = [&](std::size_t i) { return stages[i] % comm.size() == comm.rank(); };
  const auto make = [&](std::size_t i) {
    std::optional<GeneratorStates> states;
    if (seed && !layers[i].exists) {
      states.emplace(at::Device(at::kCPU)).seed(mixed_seed(*seed, {static_cast<std::int64_t>(i)}));
    }
    return made_layer(layers[i]);
  };
  std::exception_ptr failed;
  try {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (is_own(i)) own[i] = make(i);
      facts[i] = layers[i].exists || (is_own(i) && gives_the_same_again(layers[i], own[i])) ? 1 : 0;
    }
  } catch (...) {
    failed = std::current_exception();
    facts.back() = comm.rank() + 1;
  }
  comm.all_reduce(std::span(facts), {.op = ReduceOp::Max}).wait();
  if (failed) std::rethrow_exception(failed);
  if (facts.back() > 0) {
    raise(ErrorCode::Aborted, "Pipeline: rank {} could not make a layer -- its error says why", facts.back() - 1);
  }

  SharedTensors shared;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (facts[i] == 0) continue;
    if (is_own(i)) {
      shared.add(layers[i].name, stages[i], own[i]);
    } else {
      const GeneratorStates states(at::Device(at::kCPU));
      shared.add(layers[i].name, stages[i], made_layer(layers[i]));
    }
  }
  step::require_same_on_all_ranks(*step::ranks_of(comm), shared.problems(), "Pipeline");
  if (!shared.problems().empty()) {
    raise(ErrorCode::InvalidArgument,
          "Pipeline: {} -- cut so that both are in one stage, or give each one of its own: every stage would change a "
          "copy",
          shared.problems().front());
  }
  std::vector<torch::nn::AnyModule> kept;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (is_own(i)) kept.push_back(std::move(own[i]));
  }
  return kept;
}

}  // namespace cohort::nn
