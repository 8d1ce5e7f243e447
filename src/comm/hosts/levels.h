// Levels: how more hosts than a fold takes at once exchange data with few peers each. Pure data about one world, made
// once; any thread may read.
//
// The members of level 0 are the hosts. Sixteen consecutive members of a level form a group, and the groups are the
// members of the next level; the last level has one group. The data of a group (e.g. of a sum) has a part for each of
// its members, and parts are divided again at the next level. So at level k a *slot* is one member's share of one part:
// slot = member * stride(k) + part, and a part has a digit for each level below. The slots of a group's members go to
// slots of the next level, one for each digit. Slot h belongs to host h at every level, so in full groups the peers of
// a host are the 15 others. A group that is not full has slots beyond its members. One of its hosts, or of the group
// before it, holds such a slot too.
#pragma once

#include "comm/kernels/fold.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace cohort::comm::hosts {

class Levels {
 public:
  static constexpr int kRadix = static_cast<int>(kFoldBlock);

  static constexpr int kMostHosts = 60'000;  ///< so that a frame's tag has room for a slot

  /// `host` is the number of this rank's host.
  Levels(int hosts, int host) : members_{hosts}, strides_{1} {
    for (int each = 0; each < hosts; ++each) holders_[0].push_back(each);
    while (members_.back() > 1) add_level();
    mark();
    for (int level = 0; level <= count(); ++level) held_.push_back(held_by(host, level));
  }

  /// Number of levels; data is exchanged once at each, with a group of at most kRadix members.
  int count() const noexcept { return static_cast<int>(members_.size()) - 1; }
  /// Number of members of a level. Level `count()` has one member, the world.
  int members(int level) const noexcept { return members_[static_cast<std::size_t>(level)]; }
  int stride(int level) const noexcept { return strides_[static_cast<std::size_t>(level)]; }
  /// Parts into which a group of the level divides its data.
  int radix(int level) const noexcept { return std::min(kRadix, members(level)); }
  int member(int level, int slot) const noexcept { return slot / stride(level); }

  /// The slot of the next level that gets part `digit` of a slot's data.
  int next(int level, int slot, int digit) const noexcept {
    return member(level, slot) / kRadix * stride(level + 1) + digit * stride(level) + slot % stride(level);
  }
  /// The digit that distinguishes a slot of the next level from the others of its group.
  int digit(int level, int next_slot) const noexcept { return next_slot / stride(level) % radix(level); }
  /// The members whose data a slot of the next level gets: [first, last).
  std::pair<int, int> sources(int level, int next_slot) const noexcept {
    const int first = member(level + 1, next_slot) * kRadix;
    return {first, std::min(first + kRadix, members(level))};
  }
  /// The slot of `source` whose data a slot of the next level gets.
  int source_slot(int level, int next_slot, int source) const noexcept {
    return source * stride(level) + next_slot % stride(level);
  }

  /// The host that holds the slot.
  int holder(int level, int slot) const noexcept { return at(holders_, level)[static_cast<std::size_t>(slot)]; }
  /// The slots of a level that this host holds, ascending.
  const std::vector<int>& held(int level) const noexcept { return at(held_, level); }
  /// The slots of a level that `host` holds, ascending.
  std::vector<int> held_by(int host, int level) const {
    std::vector<int> held;
    const std::vector<int>& all = at(holders_, level);
    for (std::size_t slot = 0; slot < all.size(); ++slot) {
      if (all[slot] == host) held.push_back(static_cast<int>(slot));
    }
    return held;
  }
  /// True if the slot is the first that its holder has for this member, and so gets what is the same for all parts.
  bool first_of_member(int level, int slot) const noexcept {
    return at(first_of_member_, level)[static_cast<std::size_t>(slot)];
  }
  /// True if the slot is the first that its holder has for this part, and so gets a result that all members share.
  bool first_of_part(int level, int slot) const noexcept {
    return at(first_of_part_, level)[static_cast<std::size_t>(slot)];
  }
  /// The other hosts with which a host exchanges data at any level, ascending.
  std::vector<int> peers(int host) const {
    std::set<int> all;
    for (int level = 0; level < count(); ++level) {
      for (const int slot : held_by(host, level)) {
        for (int digit = 0; digit < radix(level); ++digit) all.insert(holder(level + 1, next(level, slot, digit)));
      }
      for (const int slot : held_by(host, level + 1)) {
        const auto [first, last] = sources(level, slot);
        for (int each = first; each < last; ++each) all.insert(holder(level, source_slot(level, slot, each)));
      }
    }
    all.erase(host);
    return {all.begin(), all.end()};
  }

 private:
  /// A group of fewer leaves slots beyond its members to the group before it, so that no member has many.
  static constexpr int kFew = 4;

  template <class T>
  static const T& at(const std::vector<T>& by_level, int level) noexcept {
    return by_level[static_cast<std::size_t>(level)];
  }

  void add_level() {
    const int level = count();
    const int parts = radix(level);
    members_.push_back((members(level) + kRadix - 1) / kRadix);
    strides_.push_back(stride(level) * parts);
    std::vector<int>& all = holders_.emplace_back();
    for (int slot = 0; slot < members(level + 1) * stride(level + 1); ++slot) {
      const auto [first, last] = sources(level, slot);
      const int own = first + digit(level, slot);
      const int size = last - first;
      if (own >= last && size < kFew) {
        all.push_back(all[static_cast<std::size_t>(slot - stride(level + 1))]);
      } else {
        all.push_back(holder(level, source_slot(level, slot, own < last ? own : first + (own - first) % size)));
      }
    }
  }

  void mark() {
    for (int level = 0; level <= count(); ++level) {
      std::set<std::pair<int, int>> with_member, with_part;  // by holder
      std::vector<bool>& of_member = first_of_member_.emplace_back();
      std::vector<bool>& of_part = first_of_part_.emplace_back();
      for (int slot = 0; slot < static_cast<int>(at(holders_, level).size()); ++slot) {
        of_member.push_back(with_member.emplace(holder(level, slot), member(level, slot)).second);
        of_part.push_back(with_part.emplace(holder(level, slot), slot % stride(level)).second);
      }
    }
  }

  std::vector<int> members_;
  std::vector<int> strides_;
  std::vector<std::vector<int>> holders_{1};  // by level, by slot
  std::vector<std::vector<int>> held_;        // by level
  std::vector<std::vector<bool>> first_of_member_, first_of_part_;
};

}  // namespace cohort::comm::hosts
