#include "train/step/trained.h"

#include "base/result.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace cohort::step {

std::string Change::text() const {
  switch (event) {
    case Event::Frozen: return fmt::format("'{}' was frozen", name);
    case Event::Thawed: return fmt::format("'{}' was unfrozen", name);
    case Event::Added: return fmt::format("'{}' was added", name);
    case Event::Removed: return fmt::format("'{}' was removed", name);
    case Event::Replaced: return fmt::format("'{}' was replaced", name);
    case Event::Cast: return fmt::format("'{}' was cast from {} to {}", name, from, to);
    case Event::Moved: return fmt::format("'{}' was moved from {} to {}", name, from, to);
  }
  return name;
}

Meaning Meanings::of(Event event) const noexcept {
  switch (event) {
    case Event::Frozen: return *frozen;
    case Event::Thawed: return *thawed;
    case Event::Added: return *added;
    case Event::Removed: return *removed;
    case Event::Replaced: return *replaced;
    case Event::Cast: return *cast;
    case Event::Moved: return *moved;
  }
  return Meaning::Refused;
}

std::vector<Change> Trained::compare(const std::vector<Shown>& now) const {
  std::unordered_map<std::string, const Shown*> before;
  for (const Shown& one : table_) before.emplace(one.name, &one);
  std::vector<Change> changes;
  for (const Shown& one : now) {
    const auto found = before.find(one.name);
    if (found == before.end()) {
      changes.push_back({Event::Added, one.name, {}, {}});
      continue;
    }
    const Shown& old = *found->second;
    before.erase(found);
    // Each parameter gets one event: the most significant one.
    if (old.sizes != one.sizes || (old.identity != one.identity && old.type == one.type && old.device == one.device)) {
      changes.push_back({Event::Replaced, one.name, {}, {}});
    } else if (old.type != one.type) {
      changes.push_back({Event::Cast, one.name, old.type, one.type});
    } else if (old.device != one.device) {
      changes.push_back({Event::Moved, one.name, old.device, one.device});
    } else if (old.requires_grad != one.requires_grad) {
      changes.push_back({one.requires_grad ? Event::Thawed : Event::Frozen, one.name, {}, {}});
    }
  }
  for (const Shown& one : table_) {
    if (before.contains(one.name)) changes.push_back({Event::Removed, one.name, {}, {}});
  }
  return changes;
}

std::vector<Change> Trained::update(std::vector<Shown> now, const char* where, const char* advice) {
  std::vector<Change> changes;
  if (looks_ > 0) changes = compare(now);
  const auto refused = std::ranges::find_if(
      changes, [&](const Change& change) { return meanings_.of(change.event) == Meaning::Refused; });
  if (refused != changes.end()) {
    raise(ErrorCode::InvalidArgument, "{}: parameter {}{} -- {}", where, refused->text(),
          changes.size() == 1 ? "" : fmt::format(" (the first of {} changes)", changes.size()), advice);
  }
  ++looks_;
  table_ = std::move(now);
  return changes;
}

}  // namespace cohort::step
