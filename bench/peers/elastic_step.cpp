// The cost of an elastic State in a training in which nothing happens: rounds with and without State::step, one after
// the other, of a model with the tensors of ResNet-50 (161 parameters, 106 buffers; 102 MB, with Adam 307 MB).
//
//   cohort run -np 2 elastic_step [ROUNDS [STEPS [MILLISECONDS-A-STEP]]]
//
// Or the pauses of the remaining ranks when others come and go, for so many seconds (in an elastic job):
//
//   cohort run --min-np 1 ... elastic_step pauses SECONDS
#include <cohort/elastic.h>
#include <cohort/init.h>
#include <cohort/torch/elastic.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    int number = 0;
    const auto add = [&](std::int64_t in, std::int64_t out, std::int64_t kernel) {
      register_module("conv" + std::to_string(number),
                      torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).bias(false)));
      register_module("bn" + std::to_string(number++), torch::nn::BatchNorm2d(out));
    };
    add(3, 64, 7);
    std::int64_t in = 64;
    const int blocks[] = {3, 4, 6, 3};
    for (int stage = 0; stage < 4; ++stage) {
      const std::int64_t width = std::int64_t{64} << stage;
      for (int block = 0; block < blocks[stage]; ++block) {
        if (block == 0) add(in, 4 * width, 1);
        add(in, width, 1);
        add(width, width, 3);
        add(width, 4 * width, 1);
        in = 4 * width;
      }
    }
    register_module("fc", torch::nn::Linear(2048, 1000));
  }
};
TORCH_MODULE(Net);

int pauses(cohort::elastic::State& state, cohort::data::DistributedSampler& sampler, std::chrono::seconds time) {
  const auto until = Clock::now() + time;
  constexpr auto kStep = std::chrono::milliseconds(20);
  std::vector<float> gradient(1 << 16);
  std::optional<Clock::time_point> ended;
  std::int64_t over = 0;
  state.add("over", over);
  return cohort::elastic::run(state, [&](cohort::elastic::World& world) {
    for (bool first = true; over == 0; first = false) {
      (void)sampler.next_batch();
      std::this_thread::sleep_for(kStep);
      gradient[0] = Clock::now() < until ? 0 : 1;
      world.communicator().all_reduce(std::span(gradient)).wait();
      over = gradient[0] > 0 ? 1 : 0;
      state.step();
      const auto now = Clock::now();
      if (first && ended && world.rank() == 0) {
        std::printf("epoch %ld: %d ranks, %.0f ms from a step's end to the next one's, of which a step is %ld\n",
                    static_cast<long>(world.epoch().value_or(0)), world.size(), microseconds(now - *ended) / 1000,
                    static_cast<long>(kStep.count()));
        std::fflush(stdout);
      }
      ended = now;
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
  const int rounds = number(1, 20), steps = number(2, 20);
  const auto pause = std::chrono::milliseconds(number(3, 20));
  at::set_num_threads(1);
  Net net;
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  optimizer.step();
  cohort::data::DistributedSampler sampler(1 << 22, {.batch_size = 32, .shuffle = false});
  cohort::elastic::State state;
  state.add("model", *net).add("optimizer", optimizer, *net).add("sampler", sampler);
  if (argc == 3 && std::string(argv[1]) == "pauses")
    return pauses(state, sampler, std::chrono::seconds(std::atoi(argv[2])));
  cohort::elastic::World world(cohort::init(), std::nullopt);
  const auto entering = Clock::now();
  state.enter(world);
  const double entered = microseconds(Clock::now() - entering) / 1000;
  std::vector<float> gradient(1 << 16);
  std::vector<double> with, without, spent;
  for (int round = 0; round < 2 * rounds; ++round) {
    for (int i = 0; i < steps; ++i) {
      (void)sampler.next_batch();
      const auto begun = Clock::now();
      std::this_thread::sleep_until(begun + pause);
      world.communicator().all_reduce(std::span(gradient)).wait();
      const auto stepping = Clock::now();
      if (round % 2 == 0) state.step();
      const auto ended = Clock::now();
      (round % 2 == 0 ? with : without).push_back(microseconds(ended - begun));
      if (round % 2 == 0) spent.push_back(microseconds(ended - stepping));
      if (round % 2 != 0) sampler.step();
    }
  }
  if (world.rank() == 0) {
    std::printf(
        "%d ranks: entered in %.0f ms; a step takes %.0f us, with State::step %.0f us (%+.2f %%); in it %.1f us\n",
        world.size(), entered, median(without), median(with), 100 * (median(with) / median(without) - 1),
        median(spent));
  }
  return 0;
}
