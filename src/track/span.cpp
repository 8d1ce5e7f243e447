#include "status/timeline.h"

#include <cohort/track.h>

namespace cohort::track {

namespace timeline = status::timeline;

Span::Span(std::string_view name) noexcept
    : name_(name), begun_(timeline::on() ? timeline::Clock::now() : timeline::Clock::time_point()) {}

Span::~Span() {
  if (begun_ == timeline::Clock::time_point{}) return;
  timeline::add({status::TimelineKind::Span, name_, begun_, timeline::Clock::now(), timeline::this_thread(), 0, 0, {}});
}

}  // namespace cohort::track
