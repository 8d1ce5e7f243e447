// The order in which the samples of an epoch are read: defined to the bit, since a change of it is a change of every
// user's runs. A pure function; any thread.
#pragma once

#include <cstdint>
#include <span>

namespace cohort {

/// Fills `order` with a permutation of 0 .. order.size()-1, the same for every platform, compiler and version: a
/// Fisher-Yates shuffle (for i = size-1 .. 1 swap element i with element draw(i+1)) on std::mt19937_64 seeded with
/// splitmix64(splitmix64(seed) + epoch); draw(n) is the high word of x * n (Lemire 2019, arXiv 1805.10941, with its
/// rejection, so that it is unbiased).
void permute(std::span<std::int64_t> order, std::uint64_t seed, std::int64_t epoch);

}  // namespace cohort
