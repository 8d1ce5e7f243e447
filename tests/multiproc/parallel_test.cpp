// Tensor parallelism on ranks that are processes, each with random generators of its own: what is whole stays the same
// on all ranks after nn::replicate, dropout included; without it the layers say so.
#include <cohort/torch/parallel.h>
#include <cohort/torch/recompute.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include "comm_processes.h"

namespace cohort {
namespace {

using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

/// Plain layers, and dropout of a cut activation and of a whole one, as a transformer has them.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(Communicator& tp) {
    in = register_module("in", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    up = register_module(
        "up", nn::ColumnParallelLinear(tp, nn::ColumnParallelLinearOptions{.in_features = 16, .out_features = 64}));
    part = register_module("part", nn::ParallelDropout(tp, nn::ParallelDropoutOptions{.p = 0.5}));
    down = register_module(
        "down", nn::RowParallelLinear(tp, nn::RowParallelLinearOptions{.in_features = 64, .out_features = 16}));
    whole = register_module("whole", torch::nn::Dropout(0.3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto block = [this](const at::Tensor& h) {
      const at::Tensor cut = part(up(norm(h)));
      kept = cut.detach().ne(0);
      return h + whole(down(cut));
    };
    return nn::checkpoint(block, in(x));
  }
  torch::nn::Linear in{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  nn::ColumnParallelLinear up{nullptr};
  nn::ParallelDropout part{nullptr};
  nn::RowParallelLinear down{nullptr};
  torch::nn::Dropout whole{nullptr};
  at::Tensor kept;  // of the cut activation, by its mask
};
TORCH_MODULE(Block);

std::string train(Communicator comm, bool replicates) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + comm.rank()));
  Block net(comm);
  if (replicates) nn::replicate(comm, *net);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  bool own_masks = true;
  for (int step = 0; step < 10; ++step) {
    const at::Tensor x = at::sin(at::arange(48, at::kFloat) + step).reshape({8, 6});
    optimizer.zero_grad();
    net(x).square().mean().backward();
    optimizer.step();
    const at::Tensor masks = comm.all_gather(net->kept.to(at::kByte));
    own_masks = own_masks && !at::equal(masks[0], masks[1]);
  }
  std::vector<NamedTensor> whole;
  for (const auto& item : net->named_parameters()) {
    const bool is_cut = item.key().rfind("up.", 0) == 0 || item.key() == "down.weight";
    if (!is_cut) whole.push_back({item.key(), item.value()});
  }
  require_same_parameters(comm, whole);
  return own_masks ? "the same, with masks of their own" : "the same masks";
}

std::vector<std::string> said_by(int ranks, bool replicates) {
  Processes processes(ranks);
  processes.start([&](Communicator comm) { return train(std::move(comm), replicates); });
  std::vector<std::string> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(processes.collect(rank).said);
  return all;
}

TEST(TensorParallelProcesses, KeepWhatIsWholeTheSameAfterReplicate) {
  for (const std::string& said : said_by(2, true)) EXPECT_EQ(said, "the same, with masks of their own");
}

TEST(TensorParallelProcesses, SayThatWhatIsWholeDiffersWithoutIt) {
  for (const std::string& said : said_by(2, false)) {
    EXPECT_NE(said.find("ColumnParallelLinear: the ranks' input differs"), std::string::npos) << said;
    EXPECT_NE(said.find("nn::replicate"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace cohort
