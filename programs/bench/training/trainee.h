// One rank of the training that `cohort bench training` measures where it is given no command: a network of fully
// connected layers in plain loops, since this command has no libtorch, on generated images, since the digits are not
// installed with it. Computes gradients, has each layer's averaged over all ranks while it goes on with the next, and
// steps. `cohort run` starts it, as `cohort bench trainee`.
#pragma once

#include <cohort/communicator.h>

#include <optional>
#include <vector>

namespace cohort::app::training {

struct TraineeOptions {
  std::vector<int> layers = {784, 1000, 1000, 10};
  int batch = 100;     ///< samples of each rank and step
  double seconds = 3;  ///< to train; at least 5 steps
  float rate = 0.02F;
  std::optional<DType> wire_dtype = {};  ///< of gradients between hosts, as of AllReduceOptions
};

struct Trained {
  int steps = 0;
  double first_loss = 0, last_loss = 0;  ///< of this rank
};

/// Trains, and makes sure that all ranks have the same weights at the end: throws Mismatch if not, Internal if they are
/// no numbers.
Trained train(Communicator& world, const TraineeOptions& options);

}  // namespace cohort::app::training
