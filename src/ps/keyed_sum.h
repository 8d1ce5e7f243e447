// Gradients by key, where those of a key that comes again are added to the first, in the order in which they come:
// duplicates of a push at the client, pushes of a clock at the server. Keeps its memory from one use to the next.
// One thread at a time.
#pragma once

#include "ps/key_map.h"
#include "ps/placement.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace cohort::ps {

class KeyedSum {
 public:
  /// `most`: keys that come, if that is known.
  void begin(std::size_t dim, std::size_t most = 0) {
    dim_ = dim;
    map_.clear();
    keys_.clear();
    sums_.clear();
    keys_.reserve(most);
    sums_.reserve(most * dim);
  }
  /// Memory that is held, and what will be at most with so many keys.
  std::size_t bytes() const noexcept {
    return map_.bytes() + keys_.capacity() * sizeof(std::uint64_t) + sums_.capacity() * sizeof(float);
  }
  static std::size_t bytes_for(std::size_t keys, std::size_t dim) noexcept {
    return keys == 0 ? 0 : KeyMap::bytes_for(keys) * 3 / 2 + keys * (sizeof(std::uint64_t) + dim * sizeof(float));
  }
  /// `gradient` need not be aligned. Returns the key's place.
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
  /// The key's place, without a gradient; the next free one if it is new.
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
  /// In the order in which they came first.
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
