// Do all ranks hold the same values, to the bit? Owns nothing; one thread at a time per world.
#pragma once

#include "train/gradients/ranks.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// Values of any type, one after the other in the order of the dimensions.
struct NamedValues {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::size_t element_size = 1;
  std::span<const std::uint8_t> bytes;
  std::function<std::string(std::int64_t)> text;  ///< of the element with this number; empty: its bits say it
};

/// Collective; waits. As <cohort/torch/same_parameters.h> says. `step` is for the message; -1: none.
void require_same_parameters(Ranks& ranks, std::span<const NamedValues> values, std::int64_t step);

}  // namespace cohort::gradients
