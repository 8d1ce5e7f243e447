#include "launch/membership/known_hosts.h"

#include <algorithm>

namespace cohort::launch {

void KnownHosts::list(const std::vector<PlannedHost>& hosts) {
  listed_ = added_;
  for (const PlannedHost& host : hosts) {
    const bool known = std::ranges::any_of(listed_, [&host](const PlannedHost& one) { return one.name == host.name; });
    if (!known) listed_.push_back(host);
  }
  std::erase_if(barred_, [this](const std::string& name) { return slots_of(name) == 0; });
}

void KnownHosts::add(const PlannedHost& host) {
  barred_.erase(host.name);
  failures_.erase(host.name);
  std::erase_if(held_, [&host](const auto& slot) { return slot.first.first == host.name; });
  for (auto* const list : {&added_, &listed_}) {
    std::erase_if(*list, [&host](const PlannedHost& one) { return one.name == host.name; });
    list->push_back(host);
  }
}

void KnownHosts::take_away(const std::string& host) {
  bar(host);
  std::erase_if(added_, [&host](const PlannedHost& one) { return one.name == host; });
}

int KnownHosts::slots_of(const std::string& host) const {
  const auto found = std::ranges::find(listed_, host, &PlannedHost::name);
  return found == listed_.end() ? 0 : found->slots;
}

void KnownHosts::note_failure(const std::string& host, Time now) {
  Failures& failures = failures_[host];
  if (failures.count > 0 && (!failures.free_at || *failures.free_at > now)) return;  // the same trouble again
  if (!cooldown_) {
    failures.count = 1;
    return;
  }
  const auto& [low, high] = *cooldown_;
  if (failures.free_at && now - *failures.free_at > high) failures.count = 0;  // the last failure is long ago
  ++failures.count;
  std::chrono::seconds pause = low;
  for (int i = 1; i < failures.count && pause < high; ++i) pause *= 2;
  failures.free_at = now + std::min(pause, high);
}

bool KnownHosts::may_use(const std::string& host, Time now) const {
  if (barred_.contains(host)) return false;
  const auto failures = failures_.find(host);
  return failures == failures_.end() || (failures->second.free_at && *failures->second.free_at <= now);
}

void KnownHosts::hold(const std::string& host, int slot, Time now) {
  held_[{host, slot}] = cooldown_ ? std::optional(now + cooldown_->first) : std::nullopt;
}

bool KnownHosts::is_held(const std::string& host, int slot, Time now) const {
  const auto held = held_.find({host, slot});
  return held != held_.end() && (!held->second || *held->second > now);
}

}  // namespace cohort::launch
