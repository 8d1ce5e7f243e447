// The learning rate of each step. It falls along half a cosine, so that the last steps are small and the result does
// not depend on where training happens to stop. If the batch grows with the processes, the rate begins at --lr
// and climbs to as many times that during the first epoch.
#pragma once

#include "options.h"

#include <cohort/torch/optim.h>

#include <algorithm>
#include <cmath>

class LearningRate {
 public:
  LearningRate(torch::optim::Optimizer& optimizer, const Options& options, int world_size, int64_t steps_per_epoch)
      : steps_per_epoch_(steps_per_epoch),
        total_steps_(steps_per_epoch * options.epochs),
        schedule_(optimizer,
                  {.world_size = world_size,
                   .scaling = options.batch_grows ? cohort::optim::Scaling::Linear : cohort::optim::Scaling::None,
                   .warmup_steps = options.batch_grows ? steps_per_epoch : 0,
                   .decay = [this](int64_t step) {
                     const double done = std::min(1.0, static_cast<double>(step) / static_cast<double>(total_steps_));
                     return 0.5 * (1 + std::cos(M_PI * done));
                   }}) {}
  LearningRate(const LearningRate&) = delete;
  LearningRate& operator=(const LearningRate&) = delete;

  /// After `step` steps of an earlier run, perhaps on another number of processes, which made other steps of an epoch.
  void resume(int64_t step, int64_t steps_left_in_epoch, int64_t epochs_after_it) {
    total_steps_ = step + steps_left_in_epoch + steps_per_epoch_ * epochs_after_it;
    schedule_.set_step(step);
  }
  void step() { schedule_.step(); }
  double rate_at(int64_t step) const { return schedule_.rate_at(step); }

 private:
  int64_t steps_per_epoch_, total_steps_;
  cohort::optim::WarmupScheduler schedule_;
};
