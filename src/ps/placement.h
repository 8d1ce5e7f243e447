// Which server has a key: key -> mix64 -> one of 4,096 virtual shards -> its owner by a map with a version. And which
// has a piece of a dense variable. Values and pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace cohort::ps {

inline constexpr std::uint32_t kShards = 4096;

/// A bijection that spreads neighbouring keys over all 64 bits (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
/// By the highest bits: the lowest find the row in its server's index.
constexpr std::uint32_t shard_of(std::uint64_t key) noexcept { return static_cast<std::uint32_t>(mix64(key) >> 52); }

/// Every client and server of a job has the same one: a request that comes with another version is refused.
class Placement {
 public:
  /// Shards in `servers` runs of equal length, to within one: version 1.
  static Placement even(std::uint32_t servers);

  std::uint64_t version() const noexcept { return version_; }
  std::uint32_t servers() const noexcept { return servers_; }
  std::uint32_t server_of(std::uint64_t key) const noexcept { return owners_[shard_of(key)]; }
  /// Of a dense variable of so many elements the keys are pieces of `dim` floats: runs of equal length, to within one,
  /// by "div". No elements: a sparse table.
  std::uint32_t server_of_row(std::uint64_t key, std::int64_t elements, std::int64_t dim) const noexcept;

 private:
  std::uint64_t version_ = 0;
  std::uint32_t servers_ = 0;
  std::vector<std::uint16_t> owners_;
};

}  // namespace cohort::ps
