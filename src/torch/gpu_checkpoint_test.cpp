// Checkpoints of modules on "cuda", with fake tensors (fake/cuda_tensors.cpp, which is preloaded).
#include <cohort/torch/checkpoint.h>

#include "train/formats/testing.h"

#include <cohort/communicator.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

// clang-format off
#include <ATen/Context.h>
#include <torch/nn.h>
#include <torch/optim.h>
// clang-format on

namespace cohort {
namespace {

using formats::TestFolder;

const at::Device kCpu(at::kCPU), kGpu(at::kCUDA, 0);

torch::nn::Linear make_net(at::Device device) {
  torch::nn::Linear net(5, 3);
  net->to(device);
  return net;
}

/// Bytes of all parameters.
std::string bits(const torch::nn::Module& module) {
  std::string out;
  for (const at::Tensor& tensor : module.parameters()) {
    const at::Tensor dense = tensor.detach().to(at::kCPU).contiguous();
    out.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
  }
  return out;
}

/// Takes steps whose gradients are computed from the parameters, without a graph.
void train(const torch::nn::Module& net, torch::optim::Optimizer& optimizer, int steps) {
  for (int i = 0; i < steps; ++i) {
    optimizer.step([&] {
      at::Tensor loss;
      for (at::Tensor& parameter : net.parameters()) {
        const at::Tensor values = parameter.detach();
        parameter.mutable_grad() = values * 0.5 + 0.1;
        const at::Tensor part = values.square().sum();
        loss = loss.defined() ? loss + part : part;
      }
      return loss;
    });
  }
}

template <class O, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const torch::nn::Module& net, Options options) {
  return std::make_unique<O>(net.parameters(), options);
}

TEST(CheckpointOnGpus, GoesOnToTheBitOnEitherDevice) {
  namespace o = torch::optim;
  using Make = std::function<std::unique_ptr<o::Optimizer>(const torch::nn::Module&)>;
  const std::vector<Make> optimizers = {
      [](const auto& net) { return make<o::SGD>(net, o::SGDOptions(0.05).momentum(0.9)); },
      [](const auto& net) { return make<o::Adam>(net, o::AdamOptions(0.01).amsgrad(true)); },
      [](const auto& net) { return make<o::LBFGS>(net, o::LBFGSOptions(0.1).max_iter(3)); }};
  for (std::size_t which = 0; which < optimizers.size(); ++which) {
    for (const auto& [saved_on, loaded_on] : {std::pair(kGpu, kGpu), std::pair(kGpu, kCpu), std::pair(kCpu, kGpu)}) {
      SCOPED_TRACE(fmt::format("optimizer {}, from {} to {}", which, saved_on.str(), loaded_on.str()));
      TestFolder folder;
      const auto net = make_net(saved_on);
      const auto optimizer = optimizers[which](*net);
      train(*net, *optimizer, 2);
      CheckpointFolder checkpoints(Communicator(), {.folder = folder.path()});
      checkpoints.save(*net, optimizer.get(), {.step = 2});
      train(*net, *optimizer, 2);

      auto other = make_net(loaded_on);
      const auto other_optimizer = optimizers[which](*other);
      ASSERT_TRUE(checkpoints.load_latest(*other, other_optimizer.get()));
      EXPECT_EQ(other->weight.device(), loaded_on);
      for (const auto& [key, state] : other_optimizer->state()) {
        const auto* const lbfgs = dynamic_cast<const o::LBFGSParamState*>(state.get());
        if (lbfgs != nullptr) {
          EXPECT_EQ(lbfgs->d().device(), loaded_on);
        }
      }
      train(*other, *other_optimizer, 2);
      EXPECT_EQ(bits(*other), bits(*net));
    }
  }
}

TEST(CheckpointOnGpus, HoldTheRandomStateAndWhatWasThereWhenTheSaveBegan) {
  at::Generator generator = at::globalContext().defaultGenerator(kGpu);
  for (const RankState& state : {RankState{}, RankState{{"mine", at::full({3}, 4.0, at::TensorOptions(kGpu))}}}) {
    TestFolder folder;
    auto net = make_net(kGpu);
    const std::string before = bits(*net);
    generator.set_current_seed(7);
    const at::Tensor random = generator.get_state().clone();
    CheckpointFolder checkpoints(Communicator(), {.folder = folder.path()});
    CheckpointSave save = checkpoints.save_async(*net, nullptr, {}, state);
    {
      const torch::NoGradGuard no_grad;
      net->weight.zero_();
    }
    generator.set_current_seed(8);
    save.wait();
    ASSERT_TRUE(checkpoints.load_latest(*net, nullptr));
    EXPECT_EQ(bits(*net), before);
    EXPECT_TRUE(generator.get_state().equal(random));
    for (const auto& [name, tensor] : state) {
      const at::Tensor loaded = checkpoints.rank_state().at(name);
      EXPECT_EQ(loaded.device(), kCpu);
      EXPECT_TRUE(loaded.equal(tensor.to(at::kCPU)));
    }
  }
}

}  // namespace
}  // namespace cohort
