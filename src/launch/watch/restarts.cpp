#include "launch/watch/restarts.h"

#include <fmt/format.h>

namespace cohort::launch {

Restarts::Decision Restarts::after(const Breakdown& breakdown, int world_size) {
  if (most_ == 0) return {};
  const bool soon = breakdown.after_seconds < kSoonSeconds;
  const bool same = last_ && *last_ == breakdown.cause;
  same_ = soon ? (same ? same_ + 1 : 1) : 0;
  last_ = soon ? std::optional(breakdown.cause) : std::nullopt;
  Decision decision;
  if (same_ >= kSameInARow) {
    decision.text = fmt::format("the same failure ({}) within {:g} s of the start {} times in a row; not started again",
                                breakdown.cause, kSoonSeconds, kSameInARow);
  } else if (done_ >= most_) {
    decision.text = fmt::format("failed after {} restart{} (--max-restarts)", done_, done_ == 1 ? "" : "s");
  } else {
    decision.again = true;
    decision.number = ++done_;
    decision.text = fmt::format("{}; starting all {} rank{} again ({} of {})", breakdown.text, world_size,
                                world_size == 1 ? "" : "s", done_, most_);
  }
  return decision;
}

}  // namespace cohort::launch
