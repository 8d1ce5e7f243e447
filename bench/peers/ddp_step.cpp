// The training step of an MLP of 25 million parameters under cohort::nn::DistributedDataParallel, for bench/compare
// training: how much of it is communication that backward does not hide. A rank of `cohort run`; rank 0 writes one JSON
// object to --out. One thread calls everything.
//
// Two kinds of step take turns, each after a barrier that is not timed:
//   sync   forward, backward with communication, optimizer
//   plain  a twin of the model that no DistributedDataParallel has ever seen, which trains by itself
#include <cohort/torch.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kInputs = 512;
constexpr int64_t kClasses = 10;
constexpr int64_t kHidden = 2432;
constexpr int kLayers = 6;
constexpr int64_t kBatches = 4;  // different ones, taken in turns
constexpr std::chrono::seconds kDeadline{60};

struct Options {
  std::vector<int64_t> batches = {32};
  int steps = 10;
  int warmup = 4;
  int threads = 1;
  double rate = 0.05;
  std::string out;
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("One training step, with communication and without");
  app.add_option("--batches", options.batches, "Samples per rank and step, a list with commas")->delimiter(',');
  app.add_option("--steps", options.steps, "Timed steps of each kind");
  app.add_option("--warmup", options.warmup, "Steps of each kind before them");
  app.add_option("--threads", options.threads, "Of each process");
  app.add_option("--rate", options.rate, "Learning rate");
  app.add_option("--out", options.out, "File that rank 0 writes")->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    for (int i = 0; i < kLayers; ++i) {
      const int64_t inputs = i == 0 ? kInputs : kHidden;
      const int64_t outputs = i == kLayers - 1 ? kClasses : kHidden;
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(inputs, outputs)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i + 1 < layers.size(); ++i) x = at::relu(layers[i]->forward(x));
    return layers.back()->forward(x);
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mlp);

// Not the layers' own initialisation: this one is the same to the bit in C++ and Python, whatever a version changes.
void initialise(MlpImpl& net) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(1);
  for (const torch::nn::Linear& layer : net.layers) {
    const double bound = std::sqrt(3.0 / static_cast<double>(layer->weight.size(1)));
    layer->weight.uniform_(-bound, bound, generator);
    layer->bias.zero_();
  }
}

struct Batch {
  at::Tensor inputs, labels;  // [batch, kInputs], [batch]
};

std::vector<Batch> make_batches(int64_t size, int rank) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + rank));
  std::vector<Batch> batches;
  for (int64_t i = 0; i < kBatches; ++i) {
    const at::Tensor inputs = at::empty({size, kInputs}).uniform_(-1, 1, generator);
    const at::Tensor labels = at::empty({size}, at::kLong).random_(0, kClasses, generator);
    batches.push_back({inputs, labels});
  }
  return batches;
}

// One step; returns its loss, still a tensor. Both kinds of step run this same code.
template <class Model>
at::Tensor step(Model& model, torch::optim::SGD& optimizer, const Batch& batch) {
  for (at::Tensor& parameter : optimizer.param_groups()[0].params()) parameter.mutable_grad().reset();
  at::Tensor loss = at::cross_entropy_loss(model.forward(batch.inputs), batch.labels);
  loss.backward();
  optimizer.step();
  return loss.detach();
}

// Processor time of all threads of this process, since it began.
double cpu_milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

struct Taken {
  double wall = 0, cpu = 0;  // milliseconds
};

template <class Function>
Taken timed(cohort::Communicator& comm, Function&& function) {
  comm.barrier().wait();
  const double cpu = cpu_milliseconds();
  const auto begin = std::chrono::steady_clock::now();
  function();
  const auto end = std::chrono::steady_clock::now();
  return {std::chrono::duration<double, std::milli>(end - begin).count(), cpu_milliseconds() - cpu};
}

// The time of the slowest rank, step by step.
std::vector<double> slowest(cohort::Communicator& comm, std::vector<double> times) {
  comm.all_reduce(std::span(times), {.op = cohort::ReduceOp::Max}).wait();
  return times;
}

double mean_over_ranks(cohort::Communicator& comm, double value) {
  comm.all_reduce(std::span(&value, 1), {.op = cohort::ReduceOp::Average}).wait();
  return value;
}

// Replicas that have stayed equal have equal sums, to the bit.
bool replicas_equal(cohort::Communicator& comm, MlpImpl& net) {
  double sum = 0;
  for (const at::Tensor& parameter : net.parameters()) sum += parameter.detach().to(at::kDouble).sum().item<double>();
  std::vector<double> ends = {sum, -sum};
  comm.all_reduce(std::span(ends), {.op = cohort::ReduceOp::Max}).wait();
  return ends[0] == -ends[1];
}

nlohmann::json measure(cohort::Communicator& comm, const Options& options, int64_t batch_size) {
  Mlp net;
  Mlp twin;
  initialise(*net);
  initialise(*twin);
  cohort::nn::DistributedDataParallel model(net, comm);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(options.rate));
  torch::optim::SGD twin_optimizer(twin->parameters(), torch::optim::SGDOptions(options.rate));
  const std::vector<Batch> batches = make_batches(batch_size, comm.rank());

  std::vector<double> sync, plain, sync_cpu;
  double first_loss = 0, last_loss = 0;
  for (int i = 0; i < options.warmup + options.steps; ++i) {
    const Batch& batch = batches[static_cast<size_t>(i) % batches.size()];
    const Taken plain_taken = timed(comm, [&] { step(*twin, twin_optimizer, batch); });
    at::Tensor loss;
    const Taken sync_taken = timed(comm, [&] { loss = step(model, optimizer, batch); });
    last_loss = loss.item<double>();
    if (i == 0) first_loss = last_loss;
    if (i < options.warmup) continue;
    sync.push_back(sync_taken.wall);
    plain.push_back(plain_taken.wall);
    sync_cpu.push_back(sync_taken.cpu);
  }
  int64_t parameters = 0;
  for (const at::Tensor& parameter : net->parameters()) parameters += parameter.numel();
  return {{"batch", batch_size},
          {"parameters", parameters},
          {"sync_ms", slowest(comm, sync)},
          {"plain_ms", slowest(comm, plain)},
          {"sync_cpu_ms", slowest(comm, sync_cpu)},
          {"first_loss", mean_over_ranks(comm, first_loss)},
          {"last_loss", mean_over_ranks(comm, last_loss)},
          {"replicas_equal", replicas_equal(comm, *net)}};
}

void run(const Options& options) {
  at::set_num_threads(options.threads);
  cohort::Communicator comm = cohort::init({.init_timeout = kDeadline, .timeout = kDeadline});
  nlohmann::json result = {{"side", "cohort"}, {"torch", TORCH_VERSION}, {"ranks", comm.size()}};
  for (const int64_t batch : options.batches) result["batches"].push_back(measure(comm, options, batch));
  if (comm.rank() != 0) return;
  std::ofstream file(options.out);
  file << result.dump() << '\n';
  file.close();
  if (!file) {
    throw cohort::Error(cohort::ErrorCode::Io, "writing the figures failed -- " + options.out +
                                                   " -- the file could not be written -- is its folder there?");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ddp_step: %s\n", error.what());
    return 1;
  }
  return 0;
}
