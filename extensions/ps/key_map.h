// HugePageAllocator: memory for rows and their index, which are accessed in random order: with small pages, half of the
// time would go into finding the page. Any thread.
// KeyMap: maps a 64-bit key to a 32-bit number. Open addressing with linear probing, so a look-up touches one cache
// line. An entry has the number and 32 bits of the key's hash but not the key: the owner knows each number's key. Owns
// its memory; one thread at a time.
// KeyedSum: sums of gradients by key, added in order of arrival: duplicates of a push at the client, pushes of a clock
// at the server. Keeps its memory from one use to the next. One thread at a time.
#pragma once

#include "ps/server_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace cohort::ps {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Asks the kernel for huge pages, as a hint, for memory that begins at the start of one.
inline void wish_for_huge_pages(void* memory, std::size_t bytes) noexcept {
  (void)::madvise(memory, bytes, MADV_HUGEPAGE);
}

/// For vectors that may become large.
template <class T>
struct HugePageAllocator {
  using value_type = T;
  HugePageAllocator() noexcept = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) noexcept {}
  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    void* const memory = ::operator new(bytes, std::align_val_t(kHugePage));
    wish_for_huge_pages(memory, bytes);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    if (count * sizeof(T) < kHugePage) {
      ::operator delete(memory);
    } else {
      ::operator delete(memory, std::align_val_t(kHugePage));
    }
  }
  template <class U>
  bool operator==(const HugePageAllocator<U>&) const noexcept {
    return true;
  }
};

class KeyMap {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return entries_.capacity() * sizeof(Entry); }
  /// Value of `bytes` with this many keys.
  static std::size_t bytes_for(std::size_t keys) noexcept { return entries_for(keys) * sizeof(Entry); }
  /// Returns whether adding this many keys makes the table grow; growing visits all present keys again.
  bool grows_with(std::size_t more) const noexcept { return entries_for(size_ + more) > entries_.size(); }
  void prefetch(std::uint64_t hash) const noexcept {
    if (!entries_.empty()) __builtin_prefetch(&entries_[hash & mask()]);
  }
  /// Returns the number that `is_key` accepts, or kNone. `hash` is mix64 of the key.
  template <class IsKey>
  std::uint32_t find(std::uint64_t hash, IsKey&& is_key) const {
    if (entries_.empty()) return kNone;
    for (std::size_t at = hash & mask();; at = (at + 1) & mask()) {
      const Entry& entry = entries_[at];
      if (entry.number == kNone) return kNone;
      if (entry.tag == tag(hash) && is_key(entry.number)) return entry.number;
    }
  }
  /// Returns a probable result of `find`, for prefetching the row of that number.
  std::uint32_t guess(std::uint64_t hash) const noexcept {
    return find(hash, [](std::uint32_t) { return true; });
  }
  /// Adds a key that is not in the map. `hash_of` returns the hash of another number's key, if the map has to grow.
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
  /// Removes a number that is in the map under this hash.
  template <class HashOf>
  void erase(std::uint64_t hash, std::uint32_t number, HashOf&& hash_of) {
    std::size_t hole = hash & mask();
    while (entries_[hole].number != number) hole = (hole + 1) & mask();
    // Later entries that could have been placed in the hole move up, so that no entry needs to be marked as deleted.
    for (std::size_t at = (hole + 1) & mask(); entries_[at].number != kNone; at = (at + 1) & mask()) {
      const std::size_t home = hash_of(entries_[at].number) & mask();
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;
      entries_[hole] = entries_[at];
      hole = at;
    }
    entries_[hole] = Entry{};
    --size_;
  }
  /// Empties the map, and keeps its memory.
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
  /// Returns a power of two, of which the keys fill at most seven eighths.
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

class KeyedSum {
 public:
  /// Begins a new sum. `most`: number of keys to come, if known.
  void begin(std::size_t dim, std::size_t most = 0) {
    dim_ = dim;
    map_.clear();
    keys_.clear();
    sums_.clear();
    keys_.reserve(most);
    sums_.reserve(most * dim);
  }
  /// Memory that is held, and an upper bound of it with this many keys.
  std::size_t bytes() const noexcept {
    return map_.bytes() + keys_.capacity() * sizeof(std::uint64_t) + sums_.capacity() * sizeof(float);
  }
  static std::size_t bytes_for(std::size_t keys, std::size_t dim) noexcept {
    return keys == 0 ? 0 : KeyMap::bytes_for(keys) * 3 / 2 + keys * (sizeof(std::uint64_t) + dim * sizeof(float));
  }
  /// Adds a gradient, which need not be aligned, to the key's sum. Returns the key's place.
  std::uint32_t add(std::uint64_t key, const void* gradient) {
    const std::uint32_t place = place_of(key);
    const auto* bytes = static_cast<const char*>(gradient);
    if (const std::size_t at = std::size_t{place} * dim_; at < sums_.size()) {
      for (std::size_t i = 0; i < dim_; ++i) {
        float one;
        std::memcpy(&one, bytes + i * sizeof one, sizeof one);
        sums_[at + i] += one;
      }
    } else {
      sums_.resize(at + dim_);
      std::memcpy(sums_.data() + at, bytes, dim_ * sizeof(float));
    }
    return place;
  }
  /// Returns the key's place without adding a gradient; the next free place for a new key.
  std::uint32_t place_of(std::uint64_t key) {
    const std::uint64_t hash = mix64(key);
    const std::uint32_t found = map_.find(hash, [&](std::uint32_t place) { return keys_[place] == key; });
    if (found != KeyMap::kNone) return found;
    const auto place = static_cast<std::uint32_t>(keys_.size());
    map_.insert(hash, place, [this](std::uint32_t other) { return mix64(keys_[other]); });
    keys_.push_back(key);
    return place;
  }

  std::size_t size() const noexcept { return keys_.size(); }
  /// The keys, in the order of their first appearance.
  const std::vector<std::uint64_t>& keys() const noexcept { return keys_; }
  const float* sum(std::size_t place) const noexcept { return sums_.data() + place * dim_; }
  const float* sums() const noexcept { return sums_.data(); }

 private:
  std::size_t dim_ = 0;
  KeyMap map_;
  std::vector<std::uint64_t> keys_;
  std::vector<float> sums_;
};

}  // namespace cohort::ps
