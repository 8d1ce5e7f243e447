#include "gradients/forwards.h"

#include <utility>

namespace cohort::gradients {

void Forwards::add(const std::shared_ptr<Forward>& forward) {
  std::erase_if(forwards_, [](const std::weak_ptr<Forward>& old) { return old.expired(); });
  if (!forward->hooked) unhooked_.assign(1, forward);
  forwards_.push_back(forward);
}

Forwards::List Forwards::live() const {
  List live;
  for (const std::weak_ptr<Forward>& entry : forwards_) {
    if (std::shared_ptr<Forward> forward = entry.lock()) live.push_back(std::move(forward));
  }
  return live;
}

bool Forwards::begin(const std::shared_ptr<Forward>& first, const TakesPart& takes_part) {
  const List all = live();
  const Forward* const leading = first != nullptr ? first.get() : all.empty() ? nullptr : all.back().get();
  if (leading == nullptr && !in_no_sync()) return false;
  sync_ = leading != nullptr && leading->sync && !in_no_sync();
  taking_part_.clear();
  undecided_.clear();
  for (const auto& forward : all) {
    if (forward == first) continue;
    const std::optional<bool> does = forward->hooked ? takes_part(*forward) : true;  // else its outputs were not found
    if (does.value_or(true)) (does ? taking_part_ : undecided_).push_back(forward);
  }
  if (first != nullptr) {
    // It may be listed no longer: its samples are those of this backward all the same.
    first->fired = true;
    taking_part_.push_back(first);
  }
  led_ = leading != nullptr;
  count();
  return true;
}

void Forwards::reach(const std::shared_ptr<Forward>& forward) {
  forward->fired = true;
  if (std::erase(undecided_, forward) == 0) return;
  taking_part_.push_back(forward);
  count();
}

// Of what has come to a parameter by now: what is undecided then is no part of its gradient.
void Forwards::count() {
  std::int64_t all = 0;
  samples_ = accumulated_;
  for (const auto& forward : taking_part_) {
    all += forward->samples;
    if (!forward->counted) samples_ += forward->samples;
  }
  discard_ = led_ && all == 0;
}

void Forwards::end() {
  taking_part_.clear();
  undecided_.clear();
  for (const auto& forward : live()) {
    if (!forward->fired && forward->hooked) continue;
    if (!forward->counted) accumulated_ += forward->samples;
    forward->counted = true;
    forward->reduced = sync_;
    forward->fired = false;
    std::erase_if(forwards_, [&](const std::weak_ptr<Forward>& entry) { return entry.lock() == forward; });
  }
  unhooked_.clear();
  if (sync_) accumulated_ = 0;
}

void Forwards::begin_without() {
  sync_ = true;
  discard_ = true;
  samples_ = accumulated_;
}

}  // namespace cohort::gradients
