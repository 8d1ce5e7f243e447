#include "comm/times.h"

#include "base/env.h"
#include "status/status_page.h"
#include "status/timeline.h"

namespace cohort::comm::times {
namespace {

thread_local bool left_out = false;  // of ours, or within an Exposed

std::uint64_t count_of(std::chrono::nanoseconds duration) noexcept {
  return duration.count() > 0 ? static_cast<std::uint64_t>(duration.count()) : 0;
}

}  // namespace

bool wanted() noexcept {
  static const bool wanted = env::flag(env::kTimes).value_or(false) || status::timeline::on();
  return wanted;
}

void add(const CollectiveEvent& event) noexcept {
  status::timeline::add(event);
  status::TimesStatus& times = status::StatusPage::own().times();
  constexpr auto kRelaxed = std::memory_order_relaxed;
  times.operations.fetch_add(1, kRelaxed);
  times.bytes.fetch_add(event.bytes, kRelaxed);
  times.busy_ns.fetch_add(count_of(event.ended - event.begun), kRelaxed);
  times.waited_ns.fetch_add(count_of(event.waited), kRelaxed);
  times.wire_ns.fetch_add(count_of(event.wire), kRelaxed);
  times.wire_bytes.fetch_add(event.wire_bytes, kRelaxed);
}

void leave_out_this_thread() noexcept { left_out = true; }

void add_exposed(std::uint64_t ns) noexcept {
  if (left_out || ns == 0) return;
  status::StatusPage::own().times().exposed_ns.fetch_add(ns, std::memory_order_relaxed);
}

void Exposed::begin() noexcept {
  if (left_out) return;
  left_out = true;
  begun_ = Clock::now();
}

void Exposed::end() noexcept {
  left_out = false;
  const Clock::time_point ended = Clock::now();
  status::StatusPage::own().times().exposed_ns.fetch_add(count_of(ended - begun_), std::memory_order_relaxed);
  // Asking for what has ended already is no waiting.
  if (ended - begun_ < std::chrono::microseconds(1) || !status::timeline::on()) return;
  using status::TimelineKind;
  status::timeline::add({TimelineKind::Wait, "wait", begun_, ended, status::timeline::this_thread(), 0, 0, {}});
}

}  // namespace cohort::comm::times
