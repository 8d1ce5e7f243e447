#include "named/cache.h"

#include <utility>

namespace cohort::named {

std::optional<std::size_t> Cache::find(const std::string& name, const Signature& own) const {
  const auto found = index_.find(name);
  if (found == index_.end() || slots_[found->second].own != own) return std::nullopt;
  return found->second;
}

std::optional<Cache::Freed> Cache::insert(AgreedPtr agreed, Signature own) {
  if (capacity_ == 0) return std::nullopt;
  std::optional<Freed> freed;
  if (free_.empty() && slots_.size() == capacity_) freed = release(order_.front());
  std::size_t slot = slots_.size();
  if (free_.empty()) {
    slots_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  index_.emplace(agreed->name, slot);
  slots_[slot] = {std::move(agreed), std::move(own), order_.insert(order_.end(), slot)};
  return freed;
}

void Cache::touch(std::size_t slot) { order_.splice(order_.end(), order_, slots_[slot].place); }

std::optional<Cache::Freed> Cache::erase(const std::string& name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return release(found->second);
}

Cache::Freed Cache::release(std::size_t slot) {
  Slot& old = slots_[slot];
  Freed freed{old.agreed->name, slot};
  index_.erase(freed.name);
  order_.erase(old.place);
  old = Slot();
  free_.push_back(slot);
  return freed;
}

}  // namespace cohort::named
