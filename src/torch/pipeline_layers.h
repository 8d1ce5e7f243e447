// A pipeline's layers before they are its stages: their names and makers, what they cost, and which tensors two of them
// share. Internal to torch/pipeline.cpp. One thread per rank.
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

/// libtorch's default generators of the host and of one GPU: their states are put back when this dies.
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

/// A seed for the random numbers of one purpose: the same everywhere.
std::uint64_t mixed_seed(std::uint64_t seed, std::initializer_list<std::int64_t> numbers);

struct NamedLayer {
  std::string name;
  std::function<torch::nn::AnyModule()> get;
  bool exists = false;  // it need not be made
};

/// Device of its parameters, if it has any.
std::optional<at::Device> device_of(const torch::nn::Module& module);

/// The tensor as a stage's layers get it: no leaf, so that the first of them may change it in place.
at::Tensor passed_on(const at::Tensor& leaf);

/// Seconds of forward and backward of each layer. Layers are as before afterwards, if one throws, too.
std::vector<double> measured_costs(const std::vector<NamedLayer>& layers, const at::Tensor& sample);

/// Collective. Gives the layers whose stage is this rank's (`stages[i] % comm.size()`), by ascending number, made if
/// need be: each with a seed of its own if there is a `seed`. Throws InvalidArgument on all ranks for a parameter or
/// buffer that layers of two stages share, and on all if a layer cannot be made.
std::vector<torch::nn::AnyModule> made_layers(Communicator& comm, const std::vector<NamedLayer>& layers,
                                              const std::vector<int>& stages, std::optional<std::uint64_t> seed);

}  // namespace cohort::nn
