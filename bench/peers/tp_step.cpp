// A step of 12 transformer blocks, cut over the ranks by tensor-parallel layers, for bench/compare tensor_parallel:
// what it takes, and how much of that is in collectives. A rank of `cohort run`; rank 0 writes a line of JSON. One
// thread.
//
// usage: tp_step STEPS FILE
#include <cohort/torch.h>

#include <torch/nn/modules/normalization.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

namespace nn = cohort::nn;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kWidth = 256, kHeads = 8, kLayers = 12, kBatch = 4, kSequence = 64;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(cohort::Communicator& comm) {
    const auto column = [&](std::int64_t features) {
      return nn::ColumnParallelLinear(comm,
                                      nn::ColumnParallelLinearOptions{.in_features = kWidth, .out_features = features});
    };
    const auto row = [&](std::int64_t features) {
      return nn::RowParallelLinear(comm, nn::RowParallelLinearOptions{.in_features = features, .out_features = kWidth});
    };
    first = register_module("first", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", column(3 * kWidth));
    projection = register_module("projection", row(kWidth));
    second = register_module("second", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", column(4 * kWidth));
    down = register_module("down", row(4 * kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    const std::int64_t size = kWidth / kHeads;
    const std::vector<at::Tensor> parts =
        qkv(first(x)).view({kBatch, kSequence, -1, 3 * size}).transpose(1, 2).chunk(3, -1);
    const at::Tensor weights = at::softmax(at::matmul(parts[0], parts[1].transpose(-1, -2)) * 0.18, -1);
    x = x + projection(at::matmul(weights, parts[2]).transpose(1, 2).reshape({kBatch, kSequence, -1}));
    return x + down(at::gelu(up(second(x))));
  }
  torch::nn::LayerNorm first{nullptr}, second{nullptr};
  nn::ColumnParallelLinear qkv{nullptr}, up{nullptr};
  nn::RowParallelLinear projection{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

class InCollectives : public cohort::Observer {
 public:
  void on_collective(const cohort::CollectiveEvent& event) override {
    const auto taken = event.ended - event.called;
    nanoseconds_ += std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
    ++number_;
  }
  double milliseconds() { return static_cast<double>(nanoseconds_.exchange(0)) * 1e-6; }
  int number() { return number_.exchange(0); }

 private:
  std::atomic<std::int64_t> nanoseconds_{0};
  std::atomic<int> number_{0};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int steps = std::atoi(argv[1]);
  at::set_num_threads(1);
  cohort::Communicator comm = cohort::init();
  std::vector<Block> blocks;
  for (std::int64_t i = 0; i < kLayers; ++i) blocks.emplace_back(comm);
  const at::Tensor x = at::ones({kBatch, kSequence, kWidth}).requires_grad_(true);
  InCollectives in_collectives;
  comm.set_observer(&in_collectives);
  std::string all, communication;
  int number = 0;
  for (int step = -3; step < steps; ++step) {
    comm.barrier().wait();
    (void)in_collectives.milliseconds();
    (void)in_collectives.number();
    const auto begin = Clock::now();
    at::Tensor h = x;
    for (Block& block : blocks) h = block(h);
    h.square().mean().backward();
    for (Block& block : blocks) block->zero_grad();
    const double took = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    number = in_collectives.number();
    std::vector<double> sums{took, in_collectives.milliseconds()};
    comm.all_reduce(std::span(sums), {.op = cohort::ReduceOp::Average}).wait();
    if (step < 0) continue;
    all += (step > 0 ? "," : "") + std::to_string(sums[0]);
    communication += (step > 0 ? "," : "") + std::to_string(sums[1]);
  }
  comm.set_observer(nullptr);
  if (comm.rank() == 0) {
    std::ofstream(argv[2]) << "{\"ms\":[" << all << "],\"communication_ms\":[" << communication
                           << "],\"collectives\":" << number << "}\n";
  }
}
