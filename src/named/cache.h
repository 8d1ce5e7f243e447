// Operations that all ranks have agreed on before: each has a slot, whose number stands for it in a round's bits. All
// ranks insert, use and erase in the same order, so that slots, and which go when the cache is full, are the same
// everywhere. `own` is this rank's signature, which may differ from others' in dimension 0 and splits. Not thread-safe.
#pragma once

#include "named/match.h"

#include <cstddef>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace cohort::named {

class Cache {
 public:
  /// With a capacity of 0 nothing is kept.
  explicit Cache(std::size_t capacity) : capacity_(capacity) {}

  /// The slot of what this rank brought under this name before, if it now brings the same.
  std::optional<std::size_t> find(const std::string& name, const Signature& own) const;
  /// The slot of a name, whatever this rank brings.
  std::optional<std::size_t> slot_of(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? std::nullopt : std::optional(found->second);
  }
  /// What stands in a slot; null if it is free.
  const AgreedPtr& at(std::size_t slot) const { return slots_[slot].agreed; }
  /// Slots that have been in use so far: all slots are below.
  std::size_t width() const noexcept { return slots_.size(); }

  struct Freed {
    std::string name;
    std::size_t slot = 0;
  };
  /// `agreed` has no slot yet. Returns what had to go for it.
  std::optional<Freed> insert(AgreedPtr agreed, Signature own);
  /// It was used just now.
  void touch(std::size_t slot);
  std::optional<Freed> erase(const std::string& name);

 private:
  struct Slot {
    AgreedPtr agreed;
    Signature own;
    std::list<std::size_t>::iterator place;  // in order_
  };
  Freed release(std::size_t slot);

  const std::size_t capacity_;
  std::vector<Slot> slots_;
  std::list<std::size_t> order_;  // least recently used first
  std::vector<std::size_t> free_;
  std::unordered_map<std::string, std::size_t> index_;
};

}  // namespace cohort::named
