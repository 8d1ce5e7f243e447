// All ranks of a model learn which gradient was the first that is not finite. Owns nothing; one thread at a time per
// communicator.
#pragma once

#include <cohort/torch/finite.h>

#include <cohort/communicator.h>

#include <optional>

namespace cohort::nn {

/// The first that this rank has found.
struct LocalNonFinite {
  std::size_t bucket = 0;
  int parameter = 0;  ///< its number, the same on all ranks
  NonFiniteElement element;
};

struct FirstNonFinite {
  int rank = -1;
  std::string host;
  int parameter = 0;
  std::int64_t index = 0;
  double value = 0;
};

/// Collective; waits. That of the lowest bucket, and there of the lowest rank; empty if no rank has one. Ranks that
/// have joined need not know of it.
std::optional<FirstNonFinite> first_of_all_ranks(Communicator& comm, const std::optional<LocalNonFinite>& mine);

/// The element with this number, in a tensor of these sizes.
NonFiniteElement element_of(std::int64_t index, at::IntArrayRef sizes, double value);

[[noreturn]] void throw_non_finite(const Communicator& comm, NonFiniteGradient gradient, at::IntArrayRef sizes);

}  // namespace cohort::nn
