#include "track/trace/slices.h"

#include <map>
#include <utility>
#include <vector>

namespace cohort::track {

void each_slice(const TraceSet& set, const HostPiece& piece, const std::function<void(const Slice&)>& take) {
  const sys::FileBytes bytes = read_trace(piece);
  TraceReader reader(bytes.text());
  std::map<std::uint64_t, std::vector<Slice>> open;
  // Of a thread what lies within ends first, and so stands first in the trace; each end follows its beginning.
  while (reader.next()) {
    const auto& event = reader.event();
    if (!event || event->track >= status::kExternalTracks) continue;
    const std::int64_t time = piece.common_ns(event->time_ns, set.zero_ns);
    Slice slice{status::TrackId::of(event->track), *event, std::string(event->name), time, time};
    slice.event.name = {};
    if (event->type == TraceEvent::Type::Begin) {
      open[event->track].push_back(std::move(slice));
    } else if (event->type == TraceEvent::Type::Instant) {
      take(slice);
    } else if (event->type == TraceEvent::Type::End) {
      auto& begun = open[event->track];
      if (begun.empty()) continue;
      slice = std::move(begun.back());
      begun.pop_back();
      slice.ended_ns = std::max(time, slice.begun_ns);
      take(slice);
    }
  }
}

}  // namespace cohort::track
