#include "training/trainee.h"

#include "base/result.h"
#include "status/status_page.h"
#include "training/network.h"

#include <cohort/join.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace cohort::app::training {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBatches = 4;  // of each rank, again and again
constexpr int kWarmUp = static_cast<int>(status::StatusLayout::kWarmSteps);
constexpr int kFewest = 5;  // measured steps
constexpr int kMost = 20000;

/// FNV-1a over the bits of all weights.
std::uint64_t digest_of(std::span<const float> weights) {
  std::uint64_t digest = 0xCBF29CE484222325U;
  for (const float weight : weights) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &weight, sizeof bits);
    digest = (digest ^ bits) * 0x100000001B3U;
  }
  return digest;
}

void check_same(Communicator& world, std::span<const float> weights) {
  const auto digest = static_cast<std::int64_t>(digest_of(weights) >> 1);
  std::int64_t least[] = {digest};
  std::int64_t most[] = {digest};
  world.all_reduce(std::span<std::int64_t>(least), {.op = ReduceOp::Min}).wait();
  world.all_reduce(std::span<std::int64_t>(most), {.op = ReduceOp::Max}).wait();
  if (least[0] != most[0]) raise(ErrorCode::Mismatch, "bench training: the ranks' weights differ after the training");
}

}  // namespace

Trained train(Communicator& world, const TraineeOptions& options) {
  Network network(options.layers, options.batch, 1);
  std::vector<Batch> batches;
  for (int i = 0; i < kBatches; ++i) {
    batches.push_back(make_batch(options.layers.front(), options.layers.back(), options.batch,
                                 static_cast<std::uint64_t>(world.rank() * kBatches + i)));
  }
  const Memory memory = world.allocate(network.parameters() * sizeof(float));
  const std::span<float> gradients(static_cast<float*>(memory.data()), network.parameters());
  std::vector<Work> works(network.layers());
  const auto step = [&](int number) {
    const double loss =
        network.differentiate(batches[static_cast<std::size_t>(number % kBatches)], gradients, [&](std::size_t layer) {
          works[layer] = world.all_reduce(network.part(gradients, layer),
                                          {.op = ReduceOp::Average, .wire_dtype = options.wire_dtype});
        });
    for (std::size_t layer = network.layers(); layer-- > 0;) works[layer].wait();
    network.descend(gradients, options.rate);
    status::StatusPage::own().count_step();
    return loss;
  };
  Trained trained;
  for (int i = 0; i < kWarmUp - 1; ++i) step(i);
  world.barrier().wait();
  const auto begun = Clock::now();
  step(kWarmUp - 1);
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  std::int64_t steps[] = {
      static_cast<std::int64_t>(std::clamp(options.seconds / seconds, double{kFewest}, double{kMost}))};
  world.broadcast(std::span<std::int64_t>(steps)).wait();  // rank 0's
  trained.steps = static_cast<int>(steps[0]);
  for (int i = 0; i < trained.steps; ++i) {
    const double loss = step(kWarmUp + i);
    if (i < kBatches) trained.first_loss += loss / kBatches;
    if (i >= trained.steps - kBatches) trained.last_loss += loss / kBatches;
  }
  check_same(world, network.weights());
  if (!std::isfinite(trained.last_loss)) {
    raise(ErrorCode::Internal, "bench training: the weights are no numbers any more -- other --layers or --batch?");
  }
  return trained;
}

void train(const TraineeOptions& options) {
  Communicator world = join();
  train(world, options);
}

}  // namespace cohort::app::training
