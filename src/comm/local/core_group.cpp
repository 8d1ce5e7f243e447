// Operations of a group: one after the other, where neighbours that are small and alike travel in one buffer.
#include "comm/local/core.h"

#include "base/log.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::local {
namespace {

// Larger buffers gain nothing from being copied together.
constexpr std::size_t kFusedBuffer = std::size_t{64} << 10;
constexpr std::size_t kFusedTotal = std::size_t{1} << 20;

bool fusible(const Request& request) noexcept {
  return (request.kind == Kind::AllReduce || request.kind == Kind::Broadcast) && request.input == request.output &&
         request.input_bytes() <= kFusedBuffer;
}

bool alike(const Request& a, const Request& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.weighted == b.weighted &&
         a.weight == b.weight && a.prescale == b.prescale && a.postscale == b.postscale;
}

}  // namespace

// Ranks whose groups differ anywhere differ in the first operation and are refused there. They leave the rest, so that
// a group counts as one call and what follows it still meets, also where one group is longer than the other.
std::optional<Error> Core::run_group(QueuedWork& work) noexcept {
  const std::span<const Request> requests = work.requests_;
  for (std::size_t begin = 0; begin < requests.size();) {
    std::size_t end = begin + 1;
    if (fusible(requests[begin])) {
      std::size_t bytes = requests[begin].input_bytes();
      while (end < requests.size() && fusible(requests[end]) && alike(requests[begin], requests[end]) &&
             bytes + requests[end].input_bytes() <= kFusedTotal) {
        bytes += requests[end++].input_bytes();
      }
    }
    std::optional<Error> failed = guarded(requests[begin], work.called_, [&](CollectiveEvent* event) {
      if (end - begin > 1) {
        run_fused(requests.subspan(begin, end - begin), event);
      } else {
        engine_.announce(requests[begin]);
        engine_.complete(requests[begin], event);
      }
      return true;
    });
    if (failed) return failed;
    begin = end;
  }
  return std::nullopt;
}

// The counts of all buffers are in the fingerprint, so ranks that group otherwise are refused.
void Core::run_fused(std::span<const Request> requests, CollectiveEvent* event) {
  if (!fusing_) {
    std::uint32_t id = 0;
    auto made = world_.mesh()->create_segment(kFusedTotal, id);
    if (!made) throw made.error();
    fusing_ = *std::move(made);
  }
  auto* const buffer = static_cast<std::byte*>(fusing_->data());
  Request together = requests.front();
  together.input = together.output = buffer;
  together.input_count = 0;
  Counts counts;
  std::byte* to = buffer;
  for (const Request& request : requests) {
    counts.input.push_back(request.input_count);
    together.input_count += request.input_count;
    if (request.input_count > 0) std::memcpy(to, request.input, request.input_bytes());
    to += request.input_bytes();
  }
  together.output_count = together.input_count;
  together.counts = std::make_shared<const Counts>(std::move(counts));
  engine_.announce(together);
  engine_.complete(together, event);
  const std::byte* from = buffer;
  for (const Request& request : requests) {
    if (request.input_count > 0) std::memcpy(request.output, from, request.input_bytes());
    from += request.input_bytes();
  }
}

}  // namespace cohort::comm::local
