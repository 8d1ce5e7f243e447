#include "launch/watch/clock_sync.h"

#include <utility>

namespace cohort::launch {

void ClockSync::begin() {
  if (asked_ > 0) return;
  best_.reset();
  ask();
}

void ClockSync::ask() {
  ++number_;
  ++asked_;
  asked_ns_ = ports_.now();
  ports_.send(number_);
}

void ClockSync::answer(std::uint64_t number, std::int64_t there_ns) {
  const std::int64_t now = ports_.now();
  if (asked_ == 0 || number != number_ || there_ns < 0) return;
  const std::int64_t there_and_back = now - asked_ns_;
  const std::int64_t half = there_and_back / 2 + there_and_back % 2;
  if (!best_ || half < best_->uncertainty_ns) best_ = {there_ns, there_ns - (asked_ns_ + there_and_back / 2), half};
  const int wanted = best_->uncertainty_ns > kSoon ? kMostQuestions : kQuestions;
  if (asked_ < wanted) return ask();
  end();
}

void ClockSync::end() {
  asked_ = 0;
  if (const auto best = std::exchange(best_, std::nullopt)) ports_.found(*best);
}

}  // namespace cohort::launch
