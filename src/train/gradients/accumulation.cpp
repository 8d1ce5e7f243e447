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

void Accumulation::begin(bool last) noexcept {
  ends_part_ = !in_no_sync() && forwards_ != Forwards::Local;
  sync_ = ends_part_ && last;
  const bool again = fresh_ == Fresh::None;
  if (!again) samples_ = fresh_samples_;
  conflict_ = conflict_ || samples_ == kUnknown || fresh_ == Fresh::Conflicting;
  fresh_ = Fresh::None;
  // The samples of a forward count once, however many backwards it has.
  if ((again || counts_once_) && backwards_ != Backwards::None) return;
  if (samples_ && samples_ != kUnknown) {
    total_ += *samples_;
    backwards_ = std::max(backwards_, Backwards::Counted);
  } else {
    backwards_ = Backwards::Undeclared;
  }
}

void Accumulation::end() noexcept {
  if (!ends_part_) return;
  forwards_ = Forwards::None;
  earlier_ = sync_ ? Backwards::None : std::max(earlier_, backwards_);
  earlier_weight_ = sync_ ? 0 : weight();
  earlier_total_ = sync_ ? 0 : total_;
  backwards_ = Backwards::None;
  if (!sync_) return;
  conflict_ = false;
  total_ = 0;
}

void Accumulation::go_back_to(const Accumulation& earlier) noexcept {
  const Accumulation now = *this;
  *this = earlier;
  no_sync_depth_ = now.no_sync_depth_;
  counts_once_ = now.counts_once_;
  sync_ = now.sync_;
  ends_part_ = now.ends_part_;
}

double Accumulation::coming_weight() const noexcept {
  Accumulation then = *this;
  if (then.fresh_ != Fresh::None) then.begin();
  return then.part_weight();
}

std::optional<std::int64_t> Accumulation::declared() const noexcept {
  return std::max(backwards_, earlier_) == Backwards::Undeclared ? std::nullopt : std::optional(total_);
}

}  // namespace cohort::gradients
