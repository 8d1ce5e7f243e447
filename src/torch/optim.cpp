#include <cohort/torch/optim.h>

#include "base/result.h"

#include <cmath>

namespace cohort::optim {

double scale_factor(Scaling scaling, int world_size) {
  if (world_size < 1) raise(ErrorCode::InvalidArgument, "learning rate for a world of {} ranks", world_size);
  switch (scaling) {
    case Scaling::Linear: return world_size;
    case Scaling::SquareRoot: return std::sqrt(static_cast<double>(world_size));
    case Scaling::None: break;
  }
  return 1.0;
}

WarmupScheduler::WarmupScheduler(torch::optim::Optimizer& optimizer, WarmupOptions options)
    : LRScheduler(optimizer), optimizer_(optimizer), options_(std::move(options)), base_rates_(get_current_lrs()) {
  if (options_.warmup_steps < 0) {
    raise(ErrorCode::InvalidArgument, "learning rate: {} warm-up steps", options_.warmup_steps);
  }
  (void)scale_factor(options_.scaling, options_.world_size);
  step_count_ = 0;
  apply();
}

void WarmupScheduler::set_step(std::int64_t step) {
  if (step < 0) raise(ErrorCode::InvalidArgument, "learning rate of step {}", step);
  step_count_ = static_cast<unsigned>(step);
  apply();
}

double WarmupScheduler::factor_at(std::int64_t step) const {
  const double full = scale_factor(options_.scaling, options_.world_size);
  double factor = full;
  if (step < options_.warmup_steps) {
    factor = 1.0 + (full - 1.0) * static_cast<double>(step) / static_cast<double>(options_.warmup_steps);
  }
  return options_.decay ? factor * options_.decay(step) : factor;
}

double WarmupScheduler::rate_at(std::int64_t step) const { return base_rates_.at(0) * factor_at(step); }

std::vector<double> WarmupScheduler::rates_at(std::int64_t step) const {
  std::vector<double> rates = base_rates_;
  for (double& rate : rates) rate *= factor_at(step);
  return rates;
}

// Adds 1, since libtorch calls this before it counts the step.
std::vector<double> WarmupScheduler::get_lrs() { return rates_at(std::int64_t{step_count_} + 1); }

// Needed because libtorch's own setter is private, and sets nothing before the first step().
void WarmupScheduler::apply() {
  const std::vector<double> rates = rates_at(step_count_);
  for (std::size_t i = 0; i < rates.size(); ++i) optimizer_.param_groups()[i].options().set_lr(rates[i]);
}

}  // namespace cohort::optim
