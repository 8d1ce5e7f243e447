#include "bench/training/training.h"

#include "base/result.h"
#include "telemetry/status_page.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace cohort::app::training {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = static_cast<int>(status::StatusLayout::kWarmSteps);
constexpr int kFewest = 5;  // measured steps
constexpr int kMost = 20000;

/// out[rows x columns] = left * right[inner x columns]. Neighbours in `left` are row_step or inner_step floats apart.
struct Product {
  const float* left;
  std::size_t row_step, inner_step;
  const float* right;
  float* out;
  std::size_t rows, inner, columns;
};

void multiply(const Product& p) {
  constexpr std::size_t kTile = 128;  // columns: this much of `right` stays in the cache for all rows
  std::fill_n(p.out, p.rows * p.columns, 0.0F);
  for (std::size_t begin = 0; begin < p.columns; begin += kTile) {
    const std::size_t wide = std::min(kTile, p.columns - begin);
    for (std::size_t row = 0; row < p.rows; ++row) {
      float* const out = p.out + row * p.columns + begin;
      for (std::size_t k = 0; k < p.inner; ++k) {
        const float factor = p.left[row * p.row_step + k * p.inner_step];
        const float* const right = p.right + k * p.columns + begin;
        for (std::size_t i = 0; i < wide; ++i) out[i] += factor * right[i];
      }
    }
  }
}

/// Fully connected layers with ReLU between them and a softmax at the end, without biases. All ranks have the same
/// weights. A rank's samples are noise with a mark for their class, and are the same in each step.
class Network {
 public:
  Network(const std::vector<int>& widths, int batch, int rank)
      : widths_(widths.begin(), widths.end()), batch_(static_cast<std::size_t>(batch)) {
    std::mt19937 random(1), noise(static_cast<unsigned>(rank) + 2);
    for (std::size_t layer = 0; layer < layers(); ++layer) {
      begins_.push_back(weights_.size());
      const float range = std::sqrt(6.0F / static_cast<float>(widths_[layer]));
      std::uniform_real_distribution<float> value(-range, range);
      std::generate_n(std::back_inserter(weights_), widths_[layer] * widths_[layer + 1], [&] { return value(random); });
    }
    begins_.push_back(weights_.size());
    for (const std::size_t width : widths_) outputs_.emplace_back(batch_ * width);
    std::uniform_real_distribution<float> value(-1, 1);
    for (float& pixel : outputs_.front()) pixel = value(noise);
    for (std::size_t row = 0; row < batch_; ++row)  // a pixel for each class, so that the classes can be learnt
      outputs_.front()[row * widths_.front() + row % widths_.back() % widths_.front()] += 2;
  }

  std::size_t layers() const noexcept { return widths_.size() - 1; }
  std::vector<float>& weights() noexcept { return weights_; }
  std::span<float> part(std::span<float> all, std::size_t layer) const noexcept {
    return all.subspan(begins_[layer], begins_[layer + 1] - begins_[layer]);
  }

  /// Forward and backward: calls `ready(layer)` once the layer's gradient is in its part of `gradients`, the last layer
  /// first. Returns the mean loss.
  template <class Ready>
  double differentiate(std::span<float> gradients, const Ready& ready) {
    for (std::size_t layer = 0; layer < layers(); ++layer) {
      std::vector<float>& outputs = outputs_[layer + 1];
      multiply({outputs_[layer].data(), widths_[layer], 1, part(weights_, layer).data(), outputs.data(), batch_,
                widths_[layer], widths_[layer + 1]});
      if (layer + 1 == layers()) break;
      for (float& value : outputs) value = std::max(value, 0.0F);
    }
    const double loss = softmax();
    for (std::size_t layer = layers(); layer-- > 0;) {
      const std::size_t in = widths_[layer], out = widths_[layer + 1];
      const std::vector<float>& below = outputs_[layer];
      multiply({below.data(), 1, in, error_.data(), part(gradients, layer).data(), in, batch_, out});
      ready(layer);
      if (layer == 0) break;
      std::vector<float> transposed(in * out), error(batch_ * in);
      for (std::size_t i = 0; i < in * out; ++i) transposed[i % out * in + i / out] = part(weights_, layer)[i];
      multiply({error_.data(), out, 1, transposed.data(), error.data(), batch_, out, in});
      for (std::size_t i = 0; i < error.size(); ++i) error[i] = below[i] > 0 ? error[i] : 0;
      error_ = std::move(error);
    }
    return loss;
  }

 private:
  /// Writes the derivative of the loss with respect to the last layer's outputs to error_. Sample s has class s.
  double softmax() {
    error_ = outputs_.back();
    double loss = 0;
    for (std::size_t row = 0; row < batch_; ++row) {
      const std::span<float> error = std::span(error_).subspan(row * widths_.back(), widths_.back());
      float& wanted = error[row % widths_.back()];
      const float top = *std::max_element(error.begin(), error.end());
      loss += top - wanted;
      for (float& value : error) value = std::exp(value - top);
      const float sum = std::accumulate(error.begin(), error.end(), 0.0F);
      loss += std::log(sum);
      for (float& value : error) value /= sum * static_cast<float>(batch_);
      wanted -= 1 / static_cast<float>(batch_);
    }
    return loss / static_cast<double>(batch_);
  }

  std::vector<std::size_t> widths_;
  std::size_t batch_;
  std::vector<std::size_t> begins_;  // beginning of each layer's matrix, and the end of the last
  std::vector<float> weights_, error_;
  std::vector<std::vector<float>> outputs_;  // the samples, and each layer's outputs
};

}  // namespace

Trained train(Communicator& world, const TraineeOptions& options) {
  Network network(options.layers, options.batch, world.rank());
  std::vector<float>& weights = network.weights();
  const Memory memory = world.allocate(weights.size() * sizeof(float));
  const std::span<float> gradients(static_cast<float*>(memory.data()), weights.size());
  std::vector<Work> works(network.layers());
  const auto step = [&] {
    const double loss = network.differentiate(gradients, [&](std::size_t layer) {
      works[layer] = world.all_reduce(network.part(gradients, layer),
                                      {.op = ReduceOp::Average, .wire_format = options.wire_format});
    });
    for (std::size_t layer = network.layers(); layer-- > 0;) works[layer].wait();
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= options.rate * gradients[i];
    status::StatusPage::own().count_step();
    return loss;
  };
  for (int i = 0; i < kWarmUp - 1; ++i) step();
  world.barrier().wait();
  const auto begun = Clock::now();
  Trained trained{.steps = 0, .first_loss = step(), .last_loss = 0};
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  std::int64_t steps[] = {
      static_cast<std::int64_t>(std::clamp(options.seconds / seconds, double{kFewest}, double{kMost}))};
  world.broadcast(std::span<std::int64_t>(steps)).wait();  // takes rank 0's number
  trained.steps = static_cast<int>(steps[0]);
  for (int i = 0; i < trained.steps; ++i) trained.last_loss = step();
  std::vector<float> same = weights;
  world.broadcast(std::span(same)).wait();
  if (std::memcmp(same.data(), weights.data(), same.size() * sizeof(float)) != 0)
    raise(ErrorCode::Mismatch, "bench training: the weights differ from rank 0's after the training");
  if (!std::isfinite(trained.last_loss)) {
    raise(ErrorCode::Internal, "bench training: the weights are no numbers any more -- other --layers or --batch?");
  }
  return trained;
}

}  // namespace cohort::app::training
