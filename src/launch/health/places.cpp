#include "launch/health/places.h"

#include <algorithm>

namespace cohort::launch {

void Places::list(const std::vector<PlannedHost>& hosts) {
  listed_ = added_;
  for (const PlannedHost& host : hosts) {
    if (!lists(host.name)) listed_.push_back(host);
  }
  std::erase_if(barred_, [this](const std::string& name) { return !lists(name); });
}

void Places::add(const PlannedHost& host) {
  barred_.erase(host.name);
  failures_.erase(host.name);
  std::erase_if(held_, [&host](const auto& slot) { return slot.first.first == host.name; });
  for (auto* const list : {&added_, &listed_}) {
    std::erase_if(*list, [&host](const PlannedHost& one) { return one.name == host.name; });
    list->push_back(host);
  }
}

void Places::take_away(const std::string& host) {
  bar(host);
  std::erase_if(added_, [&host](const PlannedHost& one) { return one.name == host; });
}

bool Places::lists(const std::string& host) const {
  return std::ranges::any_of(listed_, [&host](const PlannedHost& one) { return one.name == host; });
}

void Places::note_failure(const std::string& host, Time now) {
  Failures& failures = failures_[host];
  if (failures.count > 0 && (!failures.free_at || *failures.free_at > now)) return;  // of the same trouble
  if (!cooldown_) {
    failures.count = 1;
    return;
  }
  const auto& [low, high] = *cooldown_;
  if (failures.free_at && now - *failures.free_at > high) failures.count = 0;  // that is long ago
  ++failures.count;
  std::chrono::seconds pause = low;
  for (int i = 1; i < failures.count && pause < high; ++i) pause *= 2;
  failures.free_at = now + std::min(pause, high);
}

bool Places::may_use(const std::string& host, Time now) const {
  if (barred_.contains(host)) return false;
  const auto failures = failures_.find(host);
  return failures == failures_.end() || (failures->second.free_at && *failures->second.free_at <= now);
}

void Places::take_all(const PlannedHost& host) {
  for (int i = 0; i < host.ranks; ++i) take(host.first_rank + i, host.name, host.first_local + i);
}

void Places::hold(int worker, Time now) {
  held_[slots_.at(worker)] = cooldown_ ? std::optional(now + cooldown_->first) : std::nullopt;
}

std::vector<int> Places::free_slots(const PlannedHost& host, const std::function<bool(int worker)>& has_ended,
                                    Time now) const {
  std::set<Slot> taken;
  for (const auto& [worker, slot] : slots_) {
    if (!has_ended(worker)) taken.insert(slot);
  }
  std::vector<int> free;
  for (int local_rank = 0; local_rank < host.slots; ++local_rank) {
    const auto held = held_.find({host.name, local_rank});
    const bool is_held = held != held_.end() && (!held->second || *held->second > now);
    if (!is_held && !taken.contains({host.name, local_rank})) free.push_back(local_rank);
  }
  return free;
}

}  // namespace cohort::launch
