// A pipeline's layers before they are divided into stages: their names, the functions that make them, their costs, and
// tensors that two layers share. Internal to torch/pipeline.cpp. One thread per rank.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::nn {

/// Restores the states of libtorch's default generators, of the host and of one GPU, on destruction.
class GeneratorStates {
 public:
  explicit GeneratorStates(at::Device device);
  ~GeneratorStates();
  GeneratorStates(const GeneratorStates&) = delete;
  GeneratorStates& operator=(const GeneratorStates&) = delete;
  void seed(std::uint64_t seed);

 private:
  void take(at::Device device);
  std::vector<std::pair<at::Generator, at::Tensor>> kept_;
};

/// A seed for the random numbers of one purpose, the same on all platforms.
std::uint64_t mixed_seed(std::uint64_t seed, std::initializer_list<std::int64_t> numbers);

struct NamedLayer {
  std::string name;
  std::function<torch::nn::AnyModule()> get;
  bool exists = false;  // true: `get` does not make the layer
};

/// Device of the module's parameters, if it has any.
std::optional<at::Device> device_of(const torch::nn::Module& module);

/// Returns the tensor as input of a stage's layers; not as a leaf, so that the first layer may change it in place.
at::Tensor passed_on(const at::Tensor& leaf);

/// Seconds of forward and backward of each layer. Restores the layers, also if one throws.
std::vector<double> measured_costs(const std::vector<NamedLayer>& layers, const at::Tensor& sample);

/// Collective. Returns the layers of this rank's stages (`stages[i] % comm.size()`), by ascending number. Makes them if
/// necessary, each with its own seed if there is a `seed`. Throws InvalidArgument on all ranks if layers of two stages
/// share a parameter or buffer, or if a layer cannot be made.
std::vector<torch::nn::AnyModule> made_layers(Communicator& comm, const std::vector<NamedLayer>& layers,
                                              const std::vector<int>& stages, std::optional<std::uint64_t> seed);

}  // namespace cohort::nn
