#include "training/network.h"

#include "training/matrix.h"

#include <algorithm>
#include <cmath>
#include <utility>

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

}  // namespace cohort::app::training
