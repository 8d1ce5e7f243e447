#include "bench/training/network.h"

#include "base/result.h"
#include "telemetry/status_page.h"

#include <cohort/join.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace cohort::app::training {
namespace {

/// SplitMix64: the same numbers on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  /// From -1 to 1.
  float next() noexcept {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23F - 1;
  }

 private:
  std::uint64_t state_;
};

constexpr std::uint64_t kPatterns = 77;

}  // namespace

Network::Network(std::vector<int> layers, int batch, std::uint64_t seed)
    : sizes_(std::move(layers)), batch_(static_cast<std::size_t>(batch)) {
  std::size_t total = 0;
  std::size_t widest = 0;
  for (std::size_t layer = 0; layer < this->layers(); ++layer) {
    begins_.push_back(total);
    total += (inputs(layer) + 1) * outputs(layer);
    widest = std::max(widest, inputs(layer));
    activations_.emplace_back(batch_ * outputs(layer));
  }
  weights_.resize(total);
  error_.resize(batch_ * std::max(widest, outputs(this->layers() - 1)));
  error_below_.resize(error_.size());
  Random random(seed);
  for (std::size_t layer = 0; layer < this->layers(); ++layer) {
    const float range = std::sqrt(6.0F / static_cast<float>(inputs(layer)));
    float* const matrix = weights_.data() + begins_[layer];
    std::generate_n(matrix, inputs(layer) * outputs(layer), [&] { return range * random.next(); });
  }
}

std::span<float> Network::part(std::span<float> all, std::size_t layer) const noexcept {
  return all.subspan(begins_[layer], (inputs(layer) + 1) * outputs(layer));
}

double Network::forward(const Batch& batch) {
  const float* below = batch.inputs.data();
  for (std::size_t layer = 0; layer < layers(); ++layer) {
    std::vector<float>& out = activations_[layer];
    const float* const matrix = weights_.data() + begins_[layer];
    const float* const offsets = matrix + inputs(layer) * outputs(layer);
    multiply({{below, inputs(layer), 1}, matrix, out.data(), batch_, inputs(layer), outputs(layer)});
    const float least = layer + 1 < layers() ? 0.0F : -1e30F;
    for (std::size_t row = 0; row < batch_; ++row) {
      float* const values = out.data() + row * outputs(layer);
      for (std::size_t i = 0; i < outputs(layer); ++i) values[i] = std::max(values[i] + offsets[i], least);
    }
    below = out.data();
  }
  // The softmax, and with it the error of the last layer.
  const std::size_t classes = outputs(layers() - 1);
  double loss = 0;
  for (std::size_t row = 0; row < batch_; ++row) {
    const float* const values = activations_.back().data() + row * classes;
    float* const error = error_.data() + row * classes;
    const float top = *std::max_element(values, values + classes);
    float sum = 0;
    for (std::size_t i = 0; i < classes; ++i) sum += error[i] = std::exp(values[i] - top);
    const auto label = static_cast<std::size_t>(batch.labels[row]);
    loss += std::log(sum) + top - values[label];
    for (std::size_t i = 0; i < classes; ++i) {
      error[i] = (error[i] / sum - (i == label ? 1.0F : 0.0F)) / static_cast<float>(batch_);
    }
  }
  return loss / static_cast<double>(batch_);
}

double Network::differentiate(const Batch& batch, std::span<float> gradients,
                              const std::function<void(std::size_t)>& ready) {
  const double loss = forward(batch);
  for (std::size_t layer = layers(); layer-- > 0;) {
    const std::size_t in = inputs(layer);
    const std::size_t out = outputs(layer);
    const float* const below = layer > 0 ? activations_[layer - 1].data() : batch.inputs.data();
    const std::span<float> gradient = part(gradients, layer);
    multiply({{below, 1, in}, error_.data(), gradient.data(), in, batch_, out});
    float* const offsets = gradient.data() + in * out;
    std::fill_n(offsets, out, 0.0F);
    for (std::size_t row = 0; row < batch_; ++row) {
      for (std::size_t i = 0; i < out; ++i) offsets[i] += error_[row * out + i];
    }
    ready(layer);
    if (layer == 0) break;
    const float* const matrix = weights_.data() + begins_[layer];
    turned_.resize(in * out);
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t o = 0; o < out; ++o) turned_[o * in + i] = matrix[i * out + o];
    }
    multiply({{error_.data(), out, 1}, turned_.data(), error_below_.data(), batch_, out, in});
    for (std::size_t i = 0; i < batch_ * in; ++i) {
      if (below[i] <= 0) error_below_[i] = 0;
    }
    std::swap(error_, error_below_);
  }
  return loss;
}

void Network::descend(std::span<const float> gradients, float rate) noexcept {
  for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i] -= rate * gradients[i];
}

Batch make_batch(int inputs, int classes, int samples, std::uint64_t stream) {
  const auto width = static_cast<std::size_t>(inputs);
  std::vector<float> patterns(width * static_cast<std::size_t>(classes));
  Random pattern(kPatterns);
  for (float& value : patterns) value = pattern.next();
  Batch batch;
  Random random(stream * 0x9E3779B97F4A7C15U + 1);
  for (int sample = 0; sample < samples; ++sample) {
    const auto label =
        static_cast<int>((stream + static_cast<std::uint64_t>(sample)) % static_cast<std::uint64_t>(classes));
    batch.labels.push_back(label);
    const float* const shown = patterns.data() + static_cast<std::size_t>(label) * width;
    for (std::size_t i = 0; i < width; ++i) batch.inputs.push_back(0.5F * shown[i] + random.next());
  }
  return batch;
}

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
