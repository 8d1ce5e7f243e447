// From a 64-bit key to a 32-bit number: open addressing with linear probing, so that a look-up touches one cache line.
// It keeps no keys: an entry has the number and 32 bits of the key's hash, and the owner says which key a number has.
// Owns its memory; one thread at a time.
#pragma once

#include "ps/huge_pages.h"
#include "ps/placement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::ps {

class KeyMap {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return entries_.capacity() * sizeof(Entry); }
  /// What `bytes` will be with so many keys.
  static std::size_t bytes_for(std::size_t keys) noexcept { return entries_for(keys) * sizeof(Entry); }
  /// Whether all keys are met again when so many more come.
  bool grows_with(std::size_t more) const noexcept { return entries_for(size_ + more) > entries_.size(); }
  void prefetch(std::uint64_t hash) const noexcept {
    if (!entries_.empty()) __builtin_prefetch(&entries_[hash & mask()]);
  }
  /// The number that `is_key` accepts; kNone. `hash` is mix64 of the key.
  template <class IsKey>
  std::uint32_t find(std::uint64_t hash, IsKey&& is_key) const {
    if (entries_.empty()) return kNone;
    for (std::size_t at = hash & mask();; at = (at + 1) & mask()) {
      const Entry& entry = entries_[at];
      if (entry.number == kNone) return kNone;
      if (entry.tag == tag(hash) && is_key(entry.number)) return entry.number;
    }
  }
  /// A first guess of `find`, for prefetching what the number stands for.
  std::uint32_t guess(std::uint64_t hash) const noexcept {
    return find(hash, [](std::uint32_t) { return true; });
  }
  /// The key must not be there. `hash_of` says the hash of another number, when the map has to grow.
  template <class HashOf>
  void insert(std::uint64_t hash, std::uint32_t number, HashOf&& hash_of) {
    const std::size_t wanted = entries_for(size_ + 1);
    if (wanted > entries_.size()) {
      Entries old(wanted);
      old.swap(entries_);
      for (const Entry& entry : old) {
        if (entry.number != kNone) place(hash_of(entry.number), entry.number);
      }
    }
    place(hash, number);
    ++size_;
  }
  /// The number must be there, under this hash.
  template <class HashOf>
  void erase(std::uint64_t hash, std::uint32_t number, HashOf&& hash_of) {
    std::size_t hole = hash & mask();
    while (entries_[hole].number != number) hole = (hole + 1) & mask();
    // What stands behind and would have stood here moves up, so that nothing is marked as deleted.
    for (std::size_t at = (hole + 1) & mask(); entries_[at].number != kNone; at = (at + 1) & mask()) {
      const std::size_t home = hash_of(entries_[at].number) & mask();
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;
      entries_[hole] = entries_[at];
      hole = at;
    }
    entries_[hole] = Entry{};
    --size_;
  }
  /// Keeps its memory.
  void clear() noexcept {
    if (size_ > 0) std::fill(entries_.begin(), entries_.end(), Entry{});
    size_ = 0;
  }

 private:
  struct Entry {
    std::uint32_t number = kNone;
    std::uint32_t tag = 0;
  };
  using Entries = std::vector<Entry, HugePageAllocator<Entry>>;

  static std::uint32_t tag(std::uint64_t hash) noexcept { return static_cast<std::uint32_t>(hash >> 20); }
  /// A power of two, at most seven eighths full.
  static std::size_t entries_for(std::size_t keys) noexcept {
    std::size_t entries = 16;
    while (keys * 8 > entries * 7) entries *= 2;
    return entries;
  }
  std::size_t mask() const noexcept { return entries_.size() - 1; }
  void place(std::uint64_t hash, std::uint32_t number) noexcept {
    std::size_t at = hash & mask();
    while (entries_[at].number != kNone) at = (at + 1) & mask();
    entries_[at] = {number, tag(hash)};
  }

  Entries entries_;
  std::size_t size_ = 0;
};

}  // namespace cohort::ps
