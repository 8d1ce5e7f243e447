#include "launch/restarts.h"

#include <fmt/format.h>

namespace cohort::launch {

Restarts::Decision Restarts::after(const Ending& failure, int world_size) {
  if (most_ == 0) return {};
  const bool soon = failure.after_seconds < kSoonSeconds;
  const bool same = last_ && last_->code == failure.status.code && last_->signal == failure.status.signal;
  same_ = soon ? (same ? same_ + 1 : 1) : 0;
  last_ = soon ? std::optional(failure.status) : std::nullopt;
  const std::string what = sys::to_string(failure.status);
  if (same_ >= kSameInARow) {
    return {false, fmt::format("the same failure ({}) within {:g} s of the start {} times in a row; not started again",
                               what, kSoonSeconds, kSameInARow)};
  }
  if (done_ >= most_)
    return {false, fmt::format("failed after {} restart{} (--max-restarts)", done_, done_ == 1 ? "" : "s")};
  ++done_;
  return {true,
          fmt::format("rank {} on {} failed after {:.1f} s: {}; starting all {} rank{} again ({} of {})", failure.rank,
                      failure.host, failure.after_seconds, what, world_size, world_size == 1 ? "" : "s", done_, most_)};
}

}  // namespace cohort::launch
