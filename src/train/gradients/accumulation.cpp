#include "train/gradients/accumulation.h"

namespace cohort::gradients {

void Accumulation::add_forward(std::optional<std::int64_t> declared) noexcept {
  (in_no_sync() ? local_forward_ : sync_forward_) = true;
  if (fresh_ && declared == kUnknown) return;  // it may be looked at only
  fresh_conflict_ = fresh_ && (fresh_conflict_ || (fresh_samples_ != kUnknown && declared != fresh_samples_));
  fresh_samples_ = declared;
  fresh_ = true;
}

void Accumulation::begin() noexcept {
  sync_ = !in_no_sync() && (sync_forward_ || !local_forward_);
  const bool again = !fresh_;
  if (fresh_) samples_ = fresh_samples_;
  conflict_ = conflict_ || samples_ == kUnknown || (fresh_ && fresh_conflict_);
  fresh_ = false;
  // The samples of a forward count once, however many backwards it has.
  if (again && (counted_ || undeclared_)) return;
  if (samples_ && samples_ != kUnknown) {
    total_ += *samples_;
    counted_ = true;
  } else {
    undeclared_ = true;
  }
}

void Accumulation::end() noexcept {
  if (!sync_) return;
  sync_forward_ = local_forward_ = counted_ = undeclared_ = conflict_ = false;
  total_ = 0;
}

void Accumulation::begin_without() noexcept { sync_ = true; }

std::optional<std::int64_t> Accumulation::declared() const noexcept {
  return undeclared_ ? std::nullopt : std::optional(total_);
}

double Accumulation::weight() const noexcept { return undeclared_ ? 1 : static_cast<double>(total_); }

}  // namespace cohort::gradients
