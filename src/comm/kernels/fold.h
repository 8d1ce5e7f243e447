// The arithmetic of reductions: folds p inputs element by element, by ascending position in `inputs`, in one pass, and
// writes the result to all outputs. Pure functions over memory that the caller owns; any thread may call. All dispatch
// targets give the same bits: no fused multiply-add, denormals kept whatever the thread's flags say, one NaN (quiet, no
// sign, no payload), and 16-bit floats are widened exactly, folded in float32 and rounded once, to nearest even.
//
// Let A be the type that is accumulated in: float32 for float16, bfloat16, float32 and complex64, float64 for float64
// and complex128. For each element, each step rounded to A:
//   y[k]   = scales.empty() ? x[k] : x[k] * A(scales[k])
//   total  = y[0]; then for ascending k: total = op(total, y[k])      (Average: +)
//   total  = total / A(divisor)                                       (Average only, and not if the divisor is 1)
//   total  = total * A(postscale)                                     (not if postscale is 1)
//   result = total rounded to the element's type, any NaN replaced by the one NaN
// Complex numbers: scales, divisor and postscale apply to each component, Sum and Average add by component, Product is
// (ac - bd, ad + bc) of total (a, b) and y (c, d), three roundings each, and each component that is NaN is the one NaN.
// Integers: modulo 2^bits; Average divides the wrapped sum, toward zero. Bool: see ReduceOp.
#pragma once

#include "comm/kernels/arrays.h"

#include <cohort/dtype.h>

#include <cstdint>
#include <span>
#include <vector>

namespace cohort::comm {

struct FoldJob {
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;          ///< one that `supports(dtype, op)`
  std::span<const void* const> inputs;  ///< none: the result is zero
  std::span<void* const> outputs;       ///< each the same memory as an input or disjoint from all of them
  std::int64_t count = 0;               ///< elements
  /// One factor per input (a weight's share, a prescale, or their product), or empty: no factors. Scalable types only.
  std::span<const double> scales = {};
  /// Divisor of the sum, with Average only. 0: the number of inputs; 1: nothing, as a weighted average wants, whose
  /// scales add up to 1. At most 2^24, so that it is exact in every type.
  std::int64_t divisor = 0;
  /// Factor of the result. Scalable types only.
  double postscale = 1;
  /// How outputs that are no input are written, up to 64 inputs. Outputs of more inputs, or over an input, are written
  /// Cached: their lines are in the caches, or there is little to gain.
  Stores stores = Stores::Cached;
  /// Set to true if a result is NaN or infinite, else left as it is; null: nobody asks. Results are looked at while
  /// they are in the first-level cache.
  bool* non_finite = nullptr;
};

/// Elements may have any alignment. Throws InvalidArgument for what the fields above do not allow: a reduction that the
/// type does not have, factors with a type that is not scalable, scales that are not one per input, a divisor that is
/// negative or too large. Otherwise it cannot fail, and it never allocates.
void fold(const FoldJob& job);

/// Meaning of each rank's weight: ranks of weight 0 are left out, and the rest either have equal weights (the plain
/// average; `fractions` is empty) or fractions that add up to 1. Weights are finite and >= 0.
struct Weighting {
  std::vector<int> members;  ///< positions in `weights` of those that count, ascending
  std::vector<double> fractions;
};
Weighting weigh(std::span<const double> weights);
/// The same without allocating, once `into` has had as many members.
void weigh(std::span<const double> weights, Weighting& into);

// The kernels behind `fold`, one for each type and reduction, by family; each family is a file that is compiled once
// per instruction set. A kernel may assume what FoldJob demands, at least one input, output and element, ordinary
// stores, and IEEE defaults in the thread's floating-point mode.
using FoldKernel = void (*)(const FoldJob& job);

/// The kernel for the instruction set in use; null for types of another family and for what the type does not have.
FoldKernel find_float_kernel(DType dtype, ReduceOp op);    // float32, float64, complex64, complex128
FoldKernel find_half_kernel(DType dtype, ReduceOp op);     // float16, bfloat16
FoldKernel find_integer_kernel(DType dtype, ReduceOp op);  // integers, bool

}  // namespace cohort::comm
