// A rank that trains, as far as the processor and the network can tell: a few milliseconds of arithmetic and a sum over
// all ranks, step after step, until it is ended. Rank 0 says every 100 ms how many steps there were. With a file's name
// the ranks 0 and 1 meet first, and the others once that file is there.
#include <cohort/cohort.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <span>
#include <thread>
#include <vector>

int main(int argc, char** arguments) {
  try {
    cohort::Communicator world = cohort::init();
    using Clock = std::chrono::steady_clock;
    if (argc > 1) {
      float word = 1;
      if (world.rank() == 1) world.send(std::span(&word, 1), 0).wait();
      if (world.rank() == 0) world.recv(std::span(&word, 1), 1).wait();
      while (!std::filesystem::exists(arguments[1])) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::vector<float> gradient(1 << 18, 1e-3F);
    std::vector<float> weights(1 << 16, 0.5F);
    float kept = 0;
    auto told = Clock::now();
    for (long long step = 1;; ++step) {
      for (int pass = 0; pass < 40; ++pass) {
        for (float& weight : weights) weight = weight * 0.999F + 1e-4F;
      }
      world.all_reduce(std::span(gradient)).wait();
      for (float& value : gradient) value = 1e-3F;
      kept += weights.front() + gradient.back();
      if (world.rank() != 0 || Clock::now() - told < std::chrono::milliseconds(100)) continue;
      told = Clock::now();
      std::printf("steps %lld at %lld %g\n", step,
                  static_cast<long long>(std::chrono::nanoseconds(told.time_since_epoch()).count()),
                  static_cast<double>(kept));
      std::fflush(stdout);
    }
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
