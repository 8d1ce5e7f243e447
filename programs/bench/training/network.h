// A multi-layer perceptron with ReLU and a softmax at its end, and one step of its training: what `cohort bench
// training` trains if it is given no command. It owns its weights; gradients lie where the caller says. One thread.
// Products of matrices on one core, as fast as plain code gets: what the trainee computes with. Any thread, own memory.
// One rank of the training that `cohort bench training` measures: computes gradients, has each layer's averaged over
// all ranks while it goes on with the next, and steps. `cohort run` starts it, as `cohort bench trainee`.
#pragma once

#include <cohort/communicator.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
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

/// Elements of a matrix lie at data[row * row_step + column * column_step].
struct Matrix {
  const float* data = nullptr;
  std::size_t row_step = 0;
  std::size_t column_step = 1;
};

struct Product {
  Matrix left;
  const float* right = nullptr;  ///< rows one after the other
  float* out = nullptr;          ///< likewise; overwritten
  std::size_t rows = 0, inner = 0, columns = 0;
};

/// out[rows x columns] = left[rows x inner] * right[inner x columns].
void multiply(const Product& product);

struct TraineeOptions {
  std::vector<int> layers = {784, 1000, 1000, 10};
  int batch = 100;     ///< samples of each rank and step
  double seconds = 3;  ///< to train; at least 5 steps
  float rate = 0.02F;
  std::optional<DType> wire_dtype = {};  ///< of gradients between hosts, as of AllReduceOptions
};

struct Trained {
  int steps = 0;
  double first_loss = 0, last_loss = 0;  ///< of this rank, each over all its batches
};

/// Joins the world, trains, and makes sure that all ranks have the same weights at the end: throws Mismatch if not,
/// Internal if they are no numbers.
void train(const TraineeOptions& options);
/// In a world that is there.
Trained train(Communicator& world, const TraineeOptions& options);

}  // namespace cohort::app::training
