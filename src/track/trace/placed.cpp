#include "track/trace/placed.h"

#include "base/result.h"

#include <algorithm>

namespace cohort::track {

Placed::Placed(const TraceSet& set, const ChromeTrace& trace) : set_(set), piece_(nullptr) {
  if (!trace.rank) {
    raise(ErrorCode::InvalidArgument, "{}: it does not say of which rank it is -- name the rank: 3={}",
          trace.file.string(), trace.file.string());
  }
  piece_ = set.of_rank(*trace.rank);
  if (piece_ == nullptr) {
    raise(ErrorCode::InvalidArgument, "{}: it is of rank {}, and the run has none in its trace", trace.file.string(),
          *trace.rank);
  }
  if (!piece_->clock.host_ns_of(0)) {
    raise(ErrorCode::InvalidArgument, "{}: the trace of {} does not say what time of day it was", trace.file.string(),
          piece_->host);
  }
}

std::int64_t Placed::operator()(std::int64_t realtime_ns) const {
  const std::int64_t host_ns = piece_->clock.host_ns_of(realtime_ns).value_or(0);
  constexpr std::int64_t kLongest = std::int64_t{1} << 60;  // as in a trace of ours: sums with what clocks say fit
  return piece_->common_ns(std::clamp<std::int64_t>(host_ns - piece_->clock.base_ns(), 0, kLongest), set_.zero_ns);
}

std::string title_of(const ChromeTrace& trace, const ChromeTrace::Row& row) {
  const auto found = trace.names.find(row);
  return found == trace.names.end() || found->second.empty() ? fmt::format("thread {}", row.second) : found->second;
}

}  // namespace cohort::track
