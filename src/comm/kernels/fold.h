// The arithmetic of reductions: folds p inputs element by element, by ascending position in `inputs`, in one pass, and
// writes the result to all outputs. Pure functions over memory that the caller owns; any thread may call. All dispatch
// targets give the same bits: no fused multiply-add, denormals kept whatever the thread's flags say, one NaN (quiet, no
// sign, no payload), and 16-bit floats are widened exactly, folded in float32 and rounded once, to nearest even.
#pragma once

#include <cohort/dtype.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort::comm {

struct FoldJob {
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::span<const void* const> inputs;  ///< none: the result is zero
  std::span<void* const> outputs;       ///< each the same memory as an input or disjoint from all of them
  std::int64_t count = 0;               ///< elements
  /// With Average of a floating type only, one per input: the result is the sum of fraction * x (each fraction
  /// rounded to the type that is accumulated in). Empty: Average divides the sum by the number of inputs.
  std::span<const double> fractions = {};
};

/// Elements need only the alignment of their type.
void fold(const FoldJob& job);

/// What each rank's weight means: ranks of weight 0 are left out, and the rest either have equal weights (the plain
/// average; `fractions` is empty) or fractions that add up to 1. Weights are finite and >= 0.
struct Weighting {
  std::vector<int> members;  ///< positions in `weights` of those that count, ascending
  std::vector<double> fractions;
};
Weighting weigh(std::span<const double> weights);

/// Names of the instruction sets that `fold` could use on this machine, the one it uses first.
std::vector<std::string> fold_targets();

}  // namespace cohort::comm
