// The order in which the samples of an epoch are read. It is exactly specified, since changing it would change every
// user's runs. A pure function; any thread.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <utility>

namespace cohort {
namespace permutation {

// Steele, Lea, Flood 2014 (SplittableRandom); spreads neighbouring seeds and epochs over all 64 bits.
inline std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Uniform in [0, n): Lemire 2019, arXiv 1805.10941. std::uniform_int_distribution differs between standard libraries.
inline std::uint64_t draw_below(std::mt19937_64& generator, std::uint64_t n) {
  __extension__ using Wide = unsigned __int128;
  Wide product = static_cast<Wide>(generator()) * n;
  if (static_cast<std::uint64_t>(product) < n) {
    const std::uint64_t threshold = (0 - n) % n;
    while (static_cast<std::uint64_t>(product) < threshold) product = static_cast<Wide>(generator()) * n;
  }
  return static_cast<std::uint64_t>(product >> 64);
}

}  // namespace permutation

/// Fills `order` with a permutation of 0 .. order.size()-1, the same for every platform, compiler and version: a
/// Fisher-Yates shuffle (for i = size-1 .. 1 swap element i with element draw(i+1)) on std::mt19937_64 seeded with
/// splitmix64(splitmix64(seed) + epoch); draw(n) is the high word of x * n (Lemire 2019, arXiv 1805.10941, with its
/// rejection, so that it is unbiased).
inline void permute(std::span<std::int64_t> order, std::uint64_t seed, std::int64_t epoch) {
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::mt19937_64 generator(permutation::splitmix64(permutation::splitmix64(seed) + static_cast<std::uint64_t>(epoch)));
  for (std::size_t i = order.size(); i-- > 1;) std::swap(order[i], order[permutation::draw_below(generator, i + 1)]);
}

}  // namespace cohort
