// The cost of a data-parallel training step, in time and memory, when its state is divided over the ranks: an MLP of
// LAYERS square layers with Adam, 100 M parameters by default.
//
//   cohort run -np 4 sharded_step none|optimizer|gradients|parameters [LAYERS [WIDTH [STEPS [ROWS]]]]
//
// Rank 0 prints a line of JSON: the median step in milliseconds, and what all processes together hold over what they
// held before there was a model (PSS), in bytes a parameter.
#include <cohort/init.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/sharded.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <malloc.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using cohort::nn::Sharding;

/// The PSS of this process, in bytes: memory that several map counts as a part for each.
double pss() {
  ::malloc_trim(0);
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  double kib = 0;
  while (file >> word) {
    if (word != "Pss:") continue;
    file >> kib;
    break;
  }
  return kib * 1024;
}

double pss_of_all(cohort::Communicator& comm) {
  comm.barrier().wait();
  std::array<double, 1> sum = {pss()};
  comm.all_reduce(std::span(sum)).wait();
  return sum[0];
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, Sharding> modes = {{"none", Sharding::None},
                                                 {"optimizer", Sharding::Optimizer},
                                                 {"gradients", Sharding::Gradients},
                                                 {"parameters", Sharding::Parameters}};
  const auto mode = argc > 1 ? modes.find(argv[1]) : modes.end();
  if (mode == modes.end()) {
    std::fprintf(stderr, "usage: sharded_step none|optimizer|gradients|parameters [LAYERS [WIDTH [STEPS [ROWS]]]]\n");
    return 2;
  }
  const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
  const int layers = number(2, 6), width = number(3, 4096), steps = number(4, 10), rows = number(5, 2);
  at::set_num_threads(1);
  cohort::Communicator comm = cohort::init();
  {  // taken by libtorch and the communicator themselves
    torch::nn::Linear first(64, 64);
    first(at::ones({2, 64})).sum().backward();
    comm.barrier().wait();
  }
  const double before = pss_of_all(comm);
  torch::nn::Sequential net;
  for (int layer = 0; layer < layers; ++layer) net->push_back(torch::nn::Linear(width, width));
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : net->parameters()) parameters += parameter.numel();
  cohort::nn::DistributedDataParallel model(net, comm, {.sharding = mode->second});
  std::optional<torch::optim::Adam> whole;
  std::optional<cohort::optim::Sharded<torch::optim::Adam>> sharded;
  if (mode->second == Sharding::None) {
    whole.emplace(model.parameters(), torch::optim::AdamOptions(1e-4));
  } else {
    sharded.emplace(model, torch::optim::AdamOptions(1e-4));
  }
  const at::Tensor input = at::ones({rows, width}) * (comm.rank() + 1);
  std::vector<double> times;
  double most = 0;
  for (int step = 0; step < steps + 2; ++step) {
    comm.barrier().wait();
    const auto begun = Clock::now();
    model(input).square().mean().backward();
    if (step == 1) most = pss_of_all(comm);  // gradients and the optimizer's state exist
    whole ? whole->step() : sharded->step();
    model.zero_grad();
    comm.barrier().wait();
    const auto ended = Clock::now();
    if (step >= 2) times.push_back(std::chrono::duration<double, std::milli>(ended - begun).count());
  }
  const double after = pss_of_all(comm);
  if (comm.rank() != 0) return 0;
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  std::printf(
      "{\"mode\": \"%s\", \"ranks\": %d, \"parameters\": %lld, \"step_ms\": %.1f, \"bytes_a_parameter\": %.2f, "
      "\"bytes_after_backward\": %.2f}\n",
      argv[1], comm.size(), static_cast<long long>(parameters), times[times.size() / 2],
      (after - before) / static_cast<double>(parameters), (most - before) / static_cast<double>(parameters));
  return 0;
}
