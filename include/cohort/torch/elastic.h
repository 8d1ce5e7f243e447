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
  KeepGlobal,   ///< as many samples over all ranks as in the first world: each rank's share changes
  ScaleGlobal,  ///< as many samples of each rank
};

/// `state.add("model", *net)`. Parameters are the same on all ranks, to the bit, and only optimizers change them.
/// Buffers, such as the statistics of BatchNorm, and the states of the generators from which this rank draws, are those
/// of the last step's end when a step is done again.
void attach(State& state, const std::string& name, torch::nn::Module& module);

/// `state.add("optimizer", optimizer, *net)`: of libtorch's, with the module whose parameters it has. Rates are
/// multiplied by `scaling`'s factor for the number of ranks, relative to that of the first world. Throws
/// InvalidArgument for other optimizers.
void attach(State& state, const std::string& name, torch::optim::Optimizer& optimizer, torch::nn::Module& module,
            optim::Scaling scaling = optim::Scaling::None);

/// `state.add("sampler", sampler)`: State::step is its `step`, unless that was called since the last one (where batches
/// are accumulated), and each world shares out what is left of its epoch. Give it to DistributedDataParallel, too,
/// which then weights what each rank has.
void attach(State& state, const std::string& name, data::DistributedSampler& sampler,
            BatchPolicy policy = BatchPolicy::KeepGlobal);

}  // namespace cohort::elastic
