// The C++ sampler for the tests of Python's: a training that goes through several lives. Reads from stdin
//   SIZE SEED SHUFFLE(0 or 1) REMAINDER(0: keep, 1: drop, 2: pad)
//   WORLD BATCH SAVED LOST        a life: so many steps up to a checkpoint, and so many after it, which are lost
//   ...
// and prints what each rank draws, a line per step: "EPOCH CURSOR: 1 2 | 3 | ..." (the cursor after it), "end of EPOCH"
// where an epoch ends.
#include <cohort/error.h>
#include <cohort/torch/data.h>

#include <cstdint>
#include <iostream>
#include <vector>

namespace {

using cohort::data::DistributedSampler;

void step(std::vector<DistributedSampler>& samplers) {
  std::vector<std::vector<std::int64_t>> parts;
  for (DistributedSampler& sampler : samplers) {
    if (auto part = sampler.next_batch()) parts.push_back(*std::move(part));
  }
  const std::int64_t epoch = samplers[0].epoch();
  if (parts.empty()) {
    std::cout << "end of " << epoch << "\n";
    for (DistributedSampler& sampler : samplers) sampler.next_epoch();
    return;
  }
  for (DistributedSampler& sampler : samplers) sampler.step();
  std::cout << epoch << " " << samplers[0].cursor() << ":";
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (rank > 0) std::cout << " |";
    for (const std::int64_t sample : parts[rank]) std::cout << " " << sample;
  }
  std::cout << "\n";
}

}  // namespace

int main() {
  try {
    cohort::data::SamplerState checkpoint;
    int shuffle = 1;
    int remainder = 0;
    std::cin >> checkpoint.size >> checkpoint.seed >> shuffle >> remainder;
    int world = 0;
    std::int64_t batch = 0, saved = 0, lost = 0;
    while (std::cin >> world >> batch >> saved >> lost) {
      std::vector<DistributedSampler> samplers;
      for (int rank = 0; rank < world; ++rank) {
        samplers.emplace_back(checkpoint.size, cohort::data::DistributedSamplerOptions{
                                                   .batch_size = batch,
                                                   .shuffle = shuffle != 0,
                                                   .remainder = static_cast<cohort::data::Remainder>(remainder),
                                                   .rank = rank,
                                                   .world_size = world});
        samplers.back().load_state(checkpoint);
      }
      for (std::int64_t i = 0; i < saved; ++i) step(samplers);
      checkpoint = samplers[0].state();
      for (std::int64_t i = 0; i < lost; ++i) step(samplers);
    }
    return 0;
  } catch (const cohort::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
