// Operations of a group: one after the other, where neighbours that are small and alike travel in one buffer.
#include "comm/local/core.h"

#include "base/log.h"
#include "comm/fusion.h"

namespace cohort::comm::local {

// Ranks whose groups differ anywhere differ in the first operation and are refused there. They leave the rest, so that
// a group counts as one call and what follows it still meets, also where one group is longer than the other.
std::optional<Error> Core::run_group(QueuedWork& work) noexcept {
  const std::span<const Request> requests = work.requests_;
  for (std::size_t begin = 0; begin < requests.size();) {
    const std::size_t count = fusible_run(requests.subspan(begin));
    std::optional<Error> failed = guarded(requests[begin], work.called_, [&](CollectiveEvent* event) {
      if (count > 1) {
        run_fused(requests.subspan(begin, count), event);
      } else {
        engine_.announce(requests[begin]);
        engine_.complete(requests[begin], event);
      }
      return true;
    });
    if (failed) return failed;
    begin += count;
  }
  return std::nullopt;
}

void Core::run_fused(std::span<const Request> requests, CollectiveEvent* event) {
  if (!fusing_) {
    std::uint32_t id = 0;
    auto made = world_.mesh()->create_segment(kFusedTotal, id);
    if (!made) throw made.error();
    fusing_ = *std::move(made);
  }
  auto* const buffer = static_cast<std::byte*>(fusing_->data());
  const Request together = fuse(requests, buffer);
  engine_.announce(together);
  engine_.complete(together, event);
  unfuse(requests, buffer);
}

}  // namespace cohort::comm::local
