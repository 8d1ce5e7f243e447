// The C++ side of the tests in which Python and C++ go on from each other's checkpoints (python/tests).
//
//   checkpoint_peer train FOLDER OPTIMIZER [state]   two steps, a checkpoint, two more, FOLDER/after.safetensors
//   checkpoint_peer resume FOLDER OPTIMIZER OUTPUT   saves it again in OUTPUT, two steps, OUTPUT/after.safetensors
// "state": with a state of this rank's own, which resume hands on.
#include <gtest/gtest.h>  // that the models are described with

#include "torch/test_models.h"

#include <cohort/torch.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using cohort::testing::Mlp;
namespace optim = torch::optim;

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& name, const std::vector<at::Tensor>& parameters) {
  if (name == "SGD") {
    return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  }
  if (name == "Adam") {
    return std::make_unique<optim::Adam>(parameters, optim::AdamOptions(1e-2).betas({0.8, 0.99}).amsgrad(true));
  }
  if (name == "AdamW") {
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(1e-2).weight_decay(0.1));
  }
  if (name == "Adagrad") {
    return std::make_unique<optim::Adagrad>(parameters, optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
  }
  return std::make_unique<optim::RMSprop>(parameters, optim::RMSpropOptions(1e-2).momentum(0.5).centered(true));
}

void train(Mlp& net, optim::Optimizer& optimizer, int first) {
  for (int step = first; step < first + 2; ++step) {
    const auto batch = cohort::testing::batch_of(step, 4);
    optimizer.zero_grad();
    cohort::testing::loss_of(net->forward(batch.x), batch.y).backward();
    optimizer.step();
  }
}

/// State of several types and shapes; the Python side has the same.
cohort::RankState own_state() {
  return {{"counts", torch::arange(6, at::kLong).reshape({2, 3})},
          {"flag", torch::tensor(true)},
          {"half", torch::tensor({1.5, -0.25}).to(at::kBFloat16)},
          {"none", torch::empty({0, 4}, at::kFloat)}};
}

int run(const std::vector<std::string>& arguments) {
  const std::string& folder = arguments.at(1);
  Mlp net = cohort::testing::with_values(Mlp(), 0);
  const auto optimizer = make_optimizer(arguments.at(2), net->parameters());
  std::string output = folder;
  if (arguments.at(0) == "train") {
    torch::manual_seed(7);
    train(net, *optimizer, 0);
    cohort::CheckpointFolder(cohort::Communicator(), {.folder = folder})
        .save(*net, optimizer.get(),
              {.step = 2,
               .epoch = 1,
               .sampler = cohort::data::SamplerState{~std::uint64_t{0}, 1, 24, 50},
               .values = {{"best", 0.1}, {"count", std::int64_t{3}}, {"done", true}, {"name", std::string("ü")}}},
              arguments.size() > 3 ? own_state() : cohort::RankState());
  } else {
    output = arguments.at(3);
    cohort::CheckpointFolder saved(cohort::Communicator(), {.folder = folder});
    const auto info = saved.load_latest(*net, optimizer.get());
    if (!info) throw std::runtime_error("no checkpoint in " + folder);
    cohort::CheckpointFolder(cohort::Communicator(), {.folder = output})
        .save(*net, optimizer.get(), info->progress, saved.rank_state());
  }
  std::printf("%a\n", torch::rand({}, at::kDouble).item<double>());
  train(net, *optimizer, 2);
  cohort::save_weights(*net, output + "/after.safetensors");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "checkpoint_peer: %s\n", error.what());
    return 1;
  }
}
