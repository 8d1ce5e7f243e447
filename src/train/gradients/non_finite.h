// The first gradient that is not finite: where it is, and how all ranks learn of it. Owns nothing; one thread at a time
// per world.
#pragma once

#include "train/gradients/buckets.h"
#include "train/gradients/ranks.h"

#include <cohort/finite.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// The first that this rank has found.
struct LocalNonFinite {
  std::size_t bucket = 0;
  int parameter = 0;  ///< its number, the same on all ranks
  NonFiniteElement element;
};

/// The first element that is not finite in the order of the dimensions, of a gradient that lies as the parameter says.
std::optional<NonFiniteElement> first_in(const void* gradient, const Parameter& parameter,
                                         const FiniteOptions& options);

/// The position of an element with this number, in a tensor of these sizes.
std::vector<std::int64_t> position_of(std::int64_t index, std::span<const std::int64_t> sizes);

/// Collective; waits. That of the lowest bucket, and there of the lowest rank; empty if no rank has one. Ranks that
/// have joined need not know of it.
std::optional<NonFiniteGradient> first_of_all_ranks(Ranks& ranks, std::span<const Parameter> parameters,
                                                    const std::optional<LocalNonFinite>& mine, std::int64_t step);

/// What is said of it on all ranks.
std::string text_of(const NonFiniteGradient& gradient, std::span<const std::int64_t> sizes);

}  // namespace cohort::gradients
