#include "train/gradients/accumulation.h"

#include <algorithm>

namespace cohort::gradients {

void Accumulation::add_forward(std::optional<std::int64_t> declared) noexcept {
  forwards_ = std::max(forwards_, in_no_sync() ? Forwards::Local : Forwards::Synchronising);
  if (fresh_ == Fresh::None) {
    fresh_ = Fresh::Alike;
  } else if (declared == kUnknown) {
    return;  // its output may never get a backward
  } else if (fresh_samples_ != kUnknown && declared != fresh_samples_) {
    fresh_ = Fresh::Conflicting;
  }
  fresh_samples_ = declared;
}

void Accumulation::begin() noexcept {
  sync_ = !in_no_sync() && forwards_ != Forwards::Local;
  const bool again = fresh_ == Fresh::None;
  if (!again) samples_ = fresh_samples_;
  conflict_ = conflict_ || samples_ == kUnknown || fresh_ == Fresh::Conflicting;
  fresh_ = Fresh::None;
  // The samples of a forward count once, however many backwards it has.
  if (again && backwards_ != Backwards::None) return;
  if (samples_ && samples_ != kUnknown) {
    total_ += *samples_;
    backwards_ = std::max(backwards_, Backwards::Counted);
  } else {
    backwards_ = Backwards::Undeclared;
  }
}

void Accumulation::end() noexcept {
  if (!sync_) return;
  forwards_ = Forwards::None;
  backwards_ = Backwards::None;
  conflict_ = false;
  total_ = 0;
}

std::optional<std::int64_t> Accumulation::declared() const noexcept {
  return backwards_ == Backwards::Undeclared ? std::nullopt : std::optional(total_);
}

}  // namespace cohort::gradients
