// One step of an optimizer on one row. The formulas are torch's, in float32, applied to the elements in order, so that
// a row gets the same bits on any server. Pure; any thread.
#pragma once

#include "base/result.h"

#include <cohort/ps_options.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace cohort::ps {

/// The parts of a row that an optimizer uses.
struct RowView {
  float* weights = nullptr;
  float* slots = nullptr;  ///< `slots_of` floats
  std::size_t dim = 0;
  std::uint32_t step = 1;  ///< number of this row's step, from 1
};

/// Number of floats per row besides the weights.
std::size_t slots_of(const Optimizer& optimizer, std::size_t dim) noexcept;
/// Fills the slots with their values before the first step.
void begin_slots(const Optimizer& optimizer, float* slots, std::size_t dim) noexcept;
/// Does one step of the row. `lr` replaces the optimizer's own.
void step(const Optimizer& optimizer, const RowView& row, const float* gradient,
          std::optional<double> lr = std::nullopt) noexcept;
/// Fails with InvalidArgument, naming the field, for values that torch also refuses.
Result<void> check(const Optimizer& optimizer);

}  // namespace cohort::ps
