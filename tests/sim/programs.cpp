// Programs of simulated processes: the command itself, ssh, and trainings. This file and the production objects are the
// executable, of which each simulated process has an image.
#include "scenarios.h"
#include "sim.h"

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

class Weights : public cohort::elastic::Part {
 public:
  explicit Weights(std::vector<float>& values) : values_(values) {}
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

/// An elastic training of so many steps: each adds 1 to the weights, whoever takes part.
int elastic(int argc, char** argv) {
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 100;
  const auto pause = std::chrono::milliseconds(argc > 2 ? std::atoi(argv[2]) : 50);
  const char* const restart = std::getenv("COHORT_RESTART");
  const int attempt = restart == nullptr ? 0 : std::atoi(restart);
  std::vector<float> values(512, 0);
  auto weights = std::make_shared<Weights>(values);
  cohort::elastic::State state;
  state.add("weights", weights);
  double sum = 0;
  state.add("sum", sum);
  try {
    const int status = cohort::elastic::run(state, [&](cohort::elastic::World& world) {
      sim::world_begins(attempt, state.steps(), world.rank(), world.size());
      while (state.steps() < steps) {
        std::this_thread::sleep_for(pause);
        std::vector<float> gradient(values.size(), 1);
        world.communicator().all_reduce(cohort::Buffer(std::span(gradient))).wait();
        for (std::size_t i = 0; i < values.size(); ++i) values[i] += gradient[i] / static_cast<float>(world.size());
        ++weights->version_of_step;
        sum += 1;
        state.step();
        sim::step_ends(attempt, state.steps());
      }
    });
    const bool right = values.front() == static_cast<float>(state.steps()) && values.back() == values.front() &&
                       sum == static_cast<double>(state.steps());
    std::printf("ended with %d after %lld steps: %g %s\n", status, static_cast<long long>(state.steps()),
                values.front(), right ? "right" : "WRONG");
    std::fflush(stdout);
    return right ? status : 3;
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
  return run_scenarios(argc, argv);
}
