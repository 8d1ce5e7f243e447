#include "track/trace/host_clock.h"

#include "status/trace_encoder.h"

#include <algorithm>
#include <cstdlib>

namespace cohort::track {
namespace {

/// A measurement that is so much worse than the best tells less of the drift than leaving it out does.
constexpr std::int64_t kWorse = 4;
constexpr std::int64_t kNegligible = 20'000;
/// No clock runs so long, nor is so far from another; sums of some such fit.
constexpr std::int64_t kFarthest = std::int64_t{1} << 61;
/// Of the time of day.
constexpr std::int64_t kLatestDay = std::int64_t{1} << 62;

bool sane(std::int64_t ns) { return ns > -kFarthest && ns < kFarthest; }
bool sane_day(std::int64_t ns) { return ns >= 0 && ns < kLatestDay; }

}  // namespace

void HostClock::take(const TraceEvent& event) {
  if (!event.host_ns || !sane(*event.host_ns) || *event.host_ns < 0) return;
  if (event.realtime_ns && sane_day(*event.realtime_ns)) {
    if (!base_ns_ && *event.host_ns >= event.time_ns) base_ns_ = *event.host_ns - event.time_ns;
    realtime_.push_back({*event.host_ns, *event.realtime_ns});
  }
  if (event.offset_ns && sane(*event.offset_ns) && event.uncertainty_ns >= 0 &&
      event.uncertainty_ns < kFarthest / kWorse)
    offsets_.push_back({*event.host_ns, *event.offset_ns, event.uncertainty_ns});
}

void HostClock::settle() {
  const auto by_time = [](const auto& a, const auto& b) { return a.host_ns < b.host_ns; };
  std::stable_sort(realtime_.begin(), realtime_.end(), by_time);
  std::stable_sort(offsets_.begin(), offsets_.end(), by_time);
  if (offsets_.empty()) return;
  std::int64_t best = offsets_.front().uncertainty_ns;
  for (const Offset& one : offsets_) best = std::min(best, one.uncertainty_ns);
  const std::int64_t most = std::max(best * kWorse, kNegligible);
  std::erase_if(offsets_, [most](const Offset& one) { return one.uncertainty_ns > most; });
}

std::int64_t HostClock::common_ns(std::int64_t host_ns) const noexcept {
  if (offsets_.empty()) return host_ns;
  const auto after =
      std::find_if(offsets_.begin(), offsets_.end(), [host_ns](const Offset& one) { return one.host_ns >= host_ns; });
  if (after == offsets_.end()) return host_ns - offsets_.back().offset_ns;
  if (after == offsets_.begin() || after->host_ns == host_ns) return host_ns - after->offset_ns;
  const Offset& before = *std::prev(after);
  const double share =
      static_cast<double>(host_ns - before.host_ns) / static_cast<double>(after->host_ns - before.host_ns);
  const double drifted = static_cast<double>(after->offset_ns - before.offset_ns) * share;
  return host_ns - (before.offset_ns + static_cast<std::int64_t>(drifted));
}

std::optional<std::int64_t> HostClock::host_ns_of(std::int64_t realtime_ns) const noexcept {
  if (realtime_.empty() || !sane_day(realtime_ns)) return std::nullopt;
  const Realtime* nearest = &realtime_.front();
  for (const Realtime& one : realtime_) {
    if (std::llabs(one.realtime_ns - realtime_ns) < std::llabs(nearest->realtime_ns - realtime_ns)) nearest = &one;
  }
  return nearest->host_ns + (realtime_ns - nearest->realtime_ns);
}

std::optional<std::int64_t> HostClock::realtime_of(std::int64_t host_ns) const noexcept {
  if (realtime_.empty() || !sane(host_ns)) return std::nullopt;
  const Realtime* nearest = &realtime_.front();
  for (const Realtime& one : realtime_) {
    if (std::llabs(one.host_ns - host_ns) < std::llabs(nearest->host_ns - host_ns)) nearest = &one;
  }
  return nearest->realtime_ns + (host_ns - nearest->host_ns);
}

std::int64_t HostClock::uncertainty_ns() const noexcept {
  std::int64_t most = 0;
  for (const Offset& one : offsets_) most = std::max(most, one.uncertainty_ns);
  return most;
}

}  // namespace cohort::track
