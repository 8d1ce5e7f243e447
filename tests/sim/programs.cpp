// Programs of simulated processes: the command itself, ssh, and trainings. This file and the production objects are the
// executable, of which each simulated process has an image.
#include "scenarios.h"
#include "sim.h"
#include "train/gradients/test_autograd.h"
#include "train/gradients/virtual_ranks.h"
#include "training.h"

#include <cohort/communicator.h>
#include <cohort/elastic.h>
#include <cohort/error.h>
#include <cohort/init.h>
#include <cohort/preemption.h>

#include <sys/personality.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

extern "C" int cohort_main(int argc, char** argv);  // programs/cohort's main

__attribute__((section(".preinit_array"), used)) static void (*const before_constructors)() = sim::remember_executable;

namespace {

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < line.size();) {
    const auto end = std::min(line.find(' ', begin), line.size());
    if (end > begin) words.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// ssh HOST COMMAND, as starter.cpp writes it.
int ssh(int argc, char** argv) {
  int at = 1;
  while (at < argc && std::string_view(argv[at]) != "--") ++at;
  if (at + 2 >= argc) return 255;
  std::vector<std::string> words = words_of(argv[at + 2]);
  if (words.front() == "exec") words.erase(words.begin());
  return sim::run_on_host(argv[at + 1], words);
}

/// STEPS PAUSE_MS [save]: each rank all-reduces a number in each step. With `save` it has a Preemption.
int train(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 3;
  const int pause_ms = argc > 2 ? std::atoi(argv[2]) : 10;
  try {
    std::optional<cohort::Preemption> preemption;
    if (argc > 3) preemption.emplace();
    cohort::Communicator world = cohort::init();
    for (int step = 0; step < steps; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
      std::vector<float> values(1024, static_cast<float>(world.rank() + step));
      world.all_reduce(cohort::Buffer(values.data(), static_cast<std::int64_t>(values.size()), cohort::DType::Float32))
          .wait();
      const float due = static_cast<float>(world.size() * (world.size() - 1) / 2 + world.size() * step);
      if (values.front() != due || values.back() != due) {
        std::fprintf(stderr, "wrong sum %g, due %g\n", values.front(), due);
        return 3;
      }
      if (!preemption || !preemption->requested(world)) continue;
      sim::saves(step + 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      return cohort::kRequeueStatus;
    }
    if (world.rank() == 0) std::printf("trained %d steps on %d ranks\n", steps, world.size());
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

/// /bin/sh -c COMMAND, of a command of plain words, or -c SCRIPT sh COMMAND, where the script runs the command.
int shell(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) != "-c") return 127;
  std::vector<std::string> words = words_of(argv[argc - 1]);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(pointers.front(), pointers.data());
  return 127;
}

/// --host-discovery-script: the list that the scenario keeps in a file.
int discover(int, char**) {
  std::ifstream list("hosts");
  for (std::string line; std::getline(list, line);) std::printf("%s\n", line.c_str());
  return 0;
}

class WeightsPart : public cohort::elastic::Part {
 public:
  explicit WeightsPart(std::vector<float>& values) : values_(values) {}
  cohort::elastic::Contents contents() override {
    cohort::elastic::Contents all;
    all.items.push_back(
        {"values", {values_.data(), static_cast<std::int64_t>(values_.size()), cohort::DType::Float32}});
    return all;
  }
  void assign(const cohort::elastic::Contents& other) override {
    std::memcpy(values_.data(), other.items.front().memory.data, values_.size() * sizeof(float));
    ++version_of_step;
  }
  std::uint64_t version() override { return version_of_step; }
  std::uint64_t version_of_step = 0;

 private:
  std::vector<float>& values_;
};

/// The product's reducer over this world, with gradients and weights of the simulated training.
class Model {
 public:
  Model(const cohort::Communicator& comm, const sim::Training& training)
      : training_(training),
        block_(cohort::gradients::block_of(training.virtual_ranks, comm.size(), comm.rank())),
        fake_(comm, parameters(), options(training)) {}

  /// Trains this rank's virtual ranks, one after the other, and steps the weights.
  void step(std::span<float> weights, const sim::Position& at) {
    for (std::size_t number = 0, first = 0; number < fake_.values.size(); first += fake_.values[number++].size()) {
      const auto own = weights.subspan(first, static_cast<std::size_t>(sim::Training::kParameters[number]));
      fake_.values[number].assign(own.begin(), own.end());  // (which the reducer compares over the ranks)
    }
    const auto samples = training_.parts(at);
    for (int rank = block_.begin; rank < block_.end; ++rank) backward(samples[static_cast<std::size_t>(rank)]);
    std::size_t at_weight = 0;
    for (std::size_t number = 0; number < fake_.values.size(); ++number) {
      for (const float average : fake_.gradient(number)) {
        weights[at_weight] = sim::Training::stepped(weights[at_weight], average);
        ++at_weight;
      }
    }
    fake_.drop_all();
  }

 private:
  static std::vector<cohort::gradients::Parameter> parameters() {
    std::vector<cohort::gradients::Parameter> all;
    for (const std::int64_t count : sim::Training::kParameters)
      all.push_back(cohort::gradients::vector_of("p" + std::to_string(count), count));
    return all;
  }
  static cohort::nn::DistributedDataParallelOptions options(const sim::Training& training) {
    cohort::nn::DistributedDataParallelOptions all;
    if (training.seed % 2 == 0) all.first_bucket_bytes = all.bucket_bytes = 100;  // else there is one bucket
    all.virtual_ranks = training.virtual_ranks;
    return all;
  }

  /// A backward has the gradients of the last parameters first.
  void backward(const std::vector<std::int64_t>& samples) {
    fake_.begin(static_cast<std::int64_t>(samples.size()));
    std::size_t end = sim::Training::kWeights;
    for (std::size_t number = fake_.values.size(); number-- > 0;) {
      const std::vector<float>& values = fake_.values[number];
      end -= values.size();
      if (!fake_.core.receive(number)) continue;  // there are no samples
      const std::span<float> gradient = fake_.gradient(number);
      for (std::size_t i = 0; i < values.size(); ++i) gradient[i] = training_.gradient(samples, end + i, values[i]);
      fake_.defined[number] = true;
      fake_.core.arrive(number);
    }
    fake_.end();
  }

  const sim::Training& training_;
  const cohort::gradients::VirtualRange block_;
  cohort::gradients::Fake fake_;
};

/// STEPS PAUSE_MS VIRTUAL_RANKS SEED: an elastic training, whose weights after each step are due, whoever takes part.
int elastic(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::int64_t steps = std::atoll(argv[1]);
  const auto pause = std::chrono::milliseconds(std::atoi(argv[2]));
  const sim::Training training{std::atoi(argv[3]), std::strtoull(argv[4], nullptr, 10)};
  const char* const restart = std::getenv("COHORT_RESTART");
  const int attempt = restart == nullptr ? 0 : std::atoi(restart);
  sim::Weights values(sim::Training::kWeights, 0);
  auto weights = std::make_shared<WeightsPart>(values);
  sim::Position at;
  cohort::elastic::State state;
  state.add("weights", weights).add("epoch", at.epoch).add("cursor", at.cursor);
  state.add_samples("samples", [&at] { return cohort::elastic::SamplePosition{at.epoch, at.cursor}; });
  try {
    const int status = cohort::elastic::run(state, [&](cohort::elastic::World& world) {
      sim::world_begins(attempt, state.steps(), world.rank(), world.size());
      sim::weights_are(state.steps(), sim::Training::digest(values), world.rank(), world.size());
      Model model(world.communicator(), training);
      while (state.steps() < steps) {
        std::this_thread::sleep_for(pause);
        model.step(values, at);
        training.advance(at);
        ++weights->version_of_step;
        sim::weights_are(state.steps() + 1, sim::Training::digest(values), world.rank(), world.size());
        state.step();
        sim::step_ends(attempt, state.steps());
      }
    });
    std::printf("ended with %d after %lld steps\n", status, static_cast<long long>(state.steps()));
    std::fflush(stdout);
    return status;
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Addresses are part of the order of some containers: two runs of a seed have the same.
  if ((::personality(0xffffffff) & ADDR_NO_RANDOMIZE) == 0) {
    ::personality(ADDR_NO_RANDOMIZE);
    ::execv("/proc/self/exe", argv);
  }
  sim::prepare({{"cohort", cohort_main},
                {"ssh", ssh, true},
                {"train", train, true},
                {"sh", shell},
                {"discover", discover},
                {"elastic", elastic, true}});
  return scenarios::run(argc, argv);
}
