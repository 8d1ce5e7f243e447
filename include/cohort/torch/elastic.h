// Elastic training with libtorch: overloads for State::add (<cohort/elastic.h>) of modules, optimizers and samplers.
// Added objects have to outlive the State. One thread.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/elastic.h>
#include <cohort/torch/data.h>
#include <cohort/torch/optim.h>

#include <cstdint>
#include <string>

namespace cohort::elastic {

/// Meaning of a step when the number of ranks changes.
enum class BatchPolicy : std::uint8_t {
  KeepGlobal,   ///< as many samples over all ranks as in the first world, so that each rank's share changes
  ScaleGlobal,  ///< as many samples per rank as in the first world
};

/// `state.add("model", *net)`. Parameters are the same on all ranks, to the bit, and only optimizers change them.
/// Buffers, such as the statistics of BatchNorm, and the states of the generators from which this rank draws, are reset
/// to their values at the end of the last step when a step is repeated.
void attach(State& state, const std::string& name, torch::nn::Module& module);

/// `state.add("optimizer", optimizer, *net)`: adds a libtorch optimizer, with the module whose parameters it has.
/// Learning rates are multiplied by `scaling`'s factor for the number of ranks, divided by the first world's factor.
/// Throws InvalidArgument for other optimizers.
void attach(State& state, const std::string& name, torch::optim::Optimizer& optimizer, torch::nn::Module& module,
            optim::Scaling scaling = optim::Scaling::None);

/// `state.add("sampler", sampler)`: State::step calls the sampler's `step`, unless the program has called it since the
/// last State::step (to accumulate batches), and each new world divides the rest of the epoch. Give the sampler to
/// DistributedDataParallel, too, which then weights gradients by samples.
void attach(State& state, const std::string& name, data::DistributedSampler& sampler,
            BatchPolicy policy = BatchPolicy::KeepGlobal);

}  // namespace cohort::elastic
