// A multi-layer perceptron with ReLU and a softmax at its end, and one step of its training: what `cohort bench
// training` trains if it is given no command. It owns its weights; gradients lie where the caller says. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace cohort::app::training {

/// A batch: `inputs` has a row for each sample.
struct Batch {
  std::vector<float> inputs;
  std::vector<int> labels;
};

class Network {
 public:
  /// `layers`: inputs, widths, classes. The same seed gives the same weights. `batch`: samples of each step.
  Network(std::vector<int> layers, int batch, std::uint64_t seed);

  std::size_t parameters() const noexcept { return weights_.size(); }
  /// Of layer `i`, within all parameters: its matrix, and its offsets behind that.
  std::span<float> weights() noexcept { return weights_; }
  std::span<float> part(std::span<float> all, std::size_t layer) const noexcept;
  std::size_t layers() const noexcept { return sizes_.size() - 1; }

  /// Forward and backward. Writes the gradient of each layer into its part of `gradients` and calls `ready(layer)`,
  /// from the last layer to the first. Returns the mean loss.
  double differentiate(const Batch& batch, std::span<float> gradients, const std::function<void(std::size_t)>& ready);
  /// weights -= rate * gradients.
  void descend(std::span<const float> gradients, float rate) noexcept;

 private:
  std::size_t inputs(std::size_t layer) const noexcept { return static_cast<std::size_t>(sizes_[layer]); }
  std::size_t outputs(std::size_t layer) const noexcept { return static_cast<std::size_t>(sizes_[layer + 1]); }
  double forward(const Batch& batch);

  std::vector<int> sizes_;
  std::size_t batch_;
  std::vector<std::size_t> begins_;  // of each layer within the parameters
  std::vector<float> weights_;
  std::vector<std::vector<float>> activations_;  // of each layer
  std::vector<float> error_, error_below_, turned_;
};

/// Samples of a task that can be learnt: each class has a pattern, which a sample shows with noise over it. The
/// patterns are the same everywhere, the samples differ by `stream`.
Batch make_batch(int inputs, int classes, int samples, std::uint64_t stream);

}  // namespace cohort::app::training
