// The learning rate of N ranks: N times the batch needs a larger rate, reached gradually (Goyal et al. 2017, arXiv
// 1706.02677). The optimizers themselves are libtorch's. One thread at a time.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace cohort::optim {

/// Defines how the rate grows with the number of ranks, n.
enum class Scaling : std::uint8_t {
  Linear,      ///< times n: for SGD, while the batch is far smaller than the data
  SquareRoot,  ///< times sqrt(n): often better for Adam and similar optimizers
  None,        ///< unchanged: also for a global batch that does not grow with n
};

/// Returns the factor of `scaling` for `world_size` ranks.
double scale_factor(Scaling scaling, int world_size);

struct WarmupOptions {
  int world_size = 1;
  Scaling scaling = Scaling::Linear;
  /// Number of optimizer steps in which the rate grows linearly from the optimizer's own to the scaled one. 0: the rate
  /// is scaled from step 0 on.
  std::int64_t warmup_steps = 0;
  /// A further factor for each step from 0 (decay); empty: 1.
  std::function<double(std::int64_t step)> decay = {};
};

/// Sets the optimizer's rate in the constructor, for step 0, and in each `step()`. The rates that the optimizer's
/// parameter groups have at construction are meant for one rank. The optimizer must outlive it.
///
///   torch::optim::SGD optimizer(model.parameters(), 0.01);
///   cohort::optim::WarmupScheduler schedule(optimizer, {.world_size = comm.size(), .warmup_steps = 200});
///   ...  optimizer.step();  schedule.step();
class WarmupScheduler : public torch::optim::LRScheduler {
 public:
  /// Throws InvalidArgument for a world_size below 1 or negative warmup_steps.
  WarmupScheduler(torch::optim::Optimizer& optimizer, WarmupOptions options);

  /// Number of optimizer steps done; save it, and restore it with `set_step`, which also sets the rate.
  std::int64_t steps() const noexcept { return step_count_; }
  void set_step(std::int64_t step);
  /// The rate of parameter group 0 at a step.
  double rate_at(std::int64_t step) const;

 protected:
  std::vector<double> get_lrs() override;

 private:
  double factor_at(std::int64_t step) const;
  std::vector<double> rates_at(std::int64_t step) const;
  void apply();

  torch::optim::Optimizer& optimizer_;
  WarmupOptions options_;
  std::vector<double> base_rates_;
};

}  // namespace cohort::optim
