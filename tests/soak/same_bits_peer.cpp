// A training with 8 virtual ranks of "digits" (an MLP), "conv" (BatchNorm, dropout) or "gpt" (a small one): AdamW, a
// schedule, clipping, two micro-batches for each virtual rank. Ends with a line of the digest of weights and buffers.
// KERNELS: "scalar", or "mixed", another instruction set on each rank.
//
//   same_bits_peer MODEL STEPS
#include "data.h"

#include <cohort/digest.h>
#include <cohort/torch.h>

#include <fmt/format.h>
#include <hwy/highway.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kVirtualRanks = 8, kBatch = 4, kContext = 16, kVocabulary = 50, kWidth = 32, kHeads = 2;

void choose_kernels(const std::string& how, int rank) {
  if (how.empty()) return;
  std::vector<std::int64_t> targets;  // the best one first
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) targets.push_back(rest & -rest);
  const std::size_t chosen = how == "mixed" ? static_cast<std::size_t>(rank) % targets.size() : targets.size() - 1;
  hwy::SetSupportedTargetsForTest(targets[chosen]);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    for (torch::nn::LayerNorm* const norm : {&first, &second})
      *norm = register_module(norm == &first ? "first" : "second",
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    attend = register_module("attend", torch::nn::Linear(kWidth, 3 * kWidth));
    project = register_module("project", torch::nn::Linear(kWidth, kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = attend(first(x)).view({x.size(0), x.size(1), kHeads, 3, -1}).permute({3, 0, 2, 1, 4}).unbind();
    const at::Tensor mask = at::full({x.size(1), x.size(1)}, -INFINITY).triu(1);
    const at::Tensor weights = at::softmax(at::matmul(parts[0], parts[1].transpose(-2, -1)) / 4 + mask, -1);
    const at::Tensor mixed = at::matmul(at::dropout(weights, 0.1, is_training()), parts[2]);
    const at::Tensor y = x + project(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + at::dropout(down(at::gelu(up(second(y)))), 0.1, is_training());
  }
  torch::nn::LayerNorm first{nullptr}, second{nullptr};
  torch::nn::Linear attend{nullptr}, project{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// Logarithms of probabilities of each sample's classes.
torch::nn::Sequential made(const std::string& model) {
  using namespace torch::nn;
  if (model == "gpt") {
    return Sequential(Embedding(kVocabulary, kWidth), Block(), Block(), LayerNorm(LayerNormOptions({kWidth})),
                      Linear(kWidth, kVocabulary), Functional([](const at::Tensor& x) { return x.flatten(0, 1); }));
  }
  if (model == "conv") {
    return Sequential(Conv2d(Conv2dOptions(1, 8, 3).stride(2)), BatchNorm2d(8), ReLU(), Dropout(0.1),
                      Conv2d(Conv2dOptions(8, 16, 3).stride(2)), BatchNorm2d(16), ReLU(), Flatten(), Dropout(0.2),
                      Linear(16 * 6 * 6, 10));
  }
  return Sequential(Flatten(), Linear(28 * 28, 64), ReLU(), Linear(64, 10));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string model_name = argv[1];
  const std::int64_t steps = std::atoll(argv[2]);
  cohort::Communicator comm = cohort::init();
  const char* const kernels = std::getenv("KERNELS");
  choose_kernels(kernels == nullptr ? "" : kernels, comm.rank());
  at::set_num_threads(1);

  const bool is_gpt = model_name == "gpt";
  const Digits digits = load_digits(shipped_digits()).train;
  torch::manual_seed(1 + comm.rank());  // all get rank 0's weights
  torch::nn::Sequential net = made(model_name);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(2e-3));
  torch::optim::StepLR schedule(optimizer, 50, 0.5);
  cohort::data::DistributedSampler sampler(digits.size(), comm, {.batch_size = kBatch, .virtual_ranks = kVirtualRanks});
  cohort::nn::DistributedDataParallelOptions options{.bucket_bytes = 20'000, .sampler = &sampler};
  options.virtual_ranks = kVirtualRanks;
  cohort::nn::DistributedDataParallel model(net, comm, options);

  const auto loss_of = [&](const std::vector<std::int64_t>& indices, double of) {
    at::Tensor inputs, labels;
    if (is_gpt) {
      const at::Tensor at = at::arange(kContext + 1, at::kLong), from = at::tensor(indices, at::kLong).reshape({-1, 1});
      const at::Tensor text = (from * 7 + at * at * (from % 5 + 1)) % kVocabulary;
      inputs = text.slice(1, 0, kContext), labels = text.slice(1, 1).flatten();
    } else {
      const Digits batch = digits.select(indices);
      inputs = batch.images, labels = batch.labels;
    }
    return torch::nn::functional::cross_entropy(model(inputs), labels) * (static_cast<double>(indices.size()) / of);
  };
  double loss = 0;
  for (std::int64_t step = 0; step < steps;) {
    const auto indices = sampler.next_batch();
    if (!indices) {
      sampler.next_epoch();
      continue;
    }
    const auto half = indices->begin() + std::ssize(*indices) / 2;
    double sum = 0;
    if (indices->empty()) {
      model.step_without_samples();
    } else {
      const auto of = static_cast<double>(indices->size());
      if (half != indices->begin()) {
        const auto guard = model.no_sync();
        const at::Tensor part = loss_of({indices->begin(), half}, of);
        part.backward();
        sum += part.item<double>();
      }
      const at::Tensor part = loss_of({half, indices->end()}, of);
      part.backward();
      sum += part.item<double>();
    }
    if (const auto mean = model.mean_loss(sum)) loss = *mean;
    if (model.step_complete()) {
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      schedule.step();
      ++step;
    }
    sampler.step();
  }
  cohort::DigestKey key;
  key.fill(7);
  std::uint64_t digest = 0;
  auto tensors = net->parameters();
  for (const at::Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    const cohort::Digest one =
        cohort::digest_of({tensor.data_ptr(), static_cast<std::int64_t>(tensor.nbytes()), cohort::DType::UInt8}, key);
    digest = digest * 31 + one[0] + one[1];
  }
  fmt::print("digest {:016x}, loss {:.17g}\n", digest, loss);
  return 0;
}
