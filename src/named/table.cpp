#include "named/table.h"

#include <algorithm>
#include <utility>

namespace cohort::named {

void Table::add(int rank, const std::string& name, Signature signature) {
  auto found = index_.find(name);
  if (found == index_.end()) {
    entries_.push_back({name, Brought(size_), size_});
    found = index_.emplace(name, std::prev(entries_.end())).first;
  }
  auto& place = found->second->brought[static_cast<std::size_t>(rank)];
  if (!place) --found->second->missing;
  place = std::move(signature);
}

std::vector<Table::Complete> Table::take_complete(const std::vector<bool>& joined) {
  const bool nobody_joined = std::find(joined.begin(), joined.end(), true) == joined.end();
  std::vector<Complete> result;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    bool complete = entry->missing == 0;
    if (!complete && !nobody_joined) {
      complete = true;
      for (std::size_t rank = 0; rank < size_ && complete; ++rank) {
        complete = joined[rank] || entry->brought[rank].has_value();
      }
    }
    if (!complete) {
      ++entry;
      continue;
    }
    index_.erase(entry->name);
    result.push_back({std::move(entry->name), std::move(entry->brought)});
    entry = entries_.erase(entry);
  }
  return result;
}

bool Table::has(int rank, const std::string& name) const {
  const auto found = index_.find(name);
  return found != index_.end() && found->second->brought[static_cast<std::size_t>(rank)].has_value();
}

void Table::erase(const std::string& name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return;
  entries_.erase(found->second);
  index_.erase(found);
}

}  // namespace cohort::named
