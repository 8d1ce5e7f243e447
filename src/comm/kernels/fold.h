// The arithmetic of reductions: folds p inputs element by element, by ascending position in `inputs`, in one pass, and
// writes the result to all outputs. Pure functions over memory that the caller owns; any thread may call. All dispatch
// targets give the same bits: there is no fused multiply-add; denormals are kept in every floating-point mode; every
// NaN becomes the one NaN (quiet, no sign, no payload); 16-bit floats are widened exactly, folded in float32, and
// rounded once, to nearest even.
//
// Beyond kFoldBlock hosts, what is folded over hosts has the order of a tree (FoldOrder::Tree).
//
// Let A be the accumulation type: float32 for float16, bfloat16, float32 and complex64; float64 for float64 and
// complex128. Each element is computed as follows, with each step rounded to A:
//   y[k]   = scales.empty() ? x[k] : x[k] * A(scales[k])
//   total  = y[0]; then for ascending k: total = op(total, y[k])      (Average: +; or by the tree)
//   total  = total / A(divisor)                                       (Average only, and not if the divisor is 1)
//   total  = total * A(postscale)                                     (not if postscale is 1)
//   result = total rounded to the element's type, any NaN replaced by the one NaN
// Complex numbers: scales, divisor and postscale apply to each component. Sum and Average add by component. Product is
// (ac - bd, ad + bc) of total (a, b) and y (c, d), with three roundings each. Each component that is NaN becomes the
// one NaN. Integers: computed modulo 2^bits; Average divides the wrapped sum, toward zero. Bool: see ReduceOp.
#pragma once

#include "comm/kernels/arrays.h"

#include <cohort/dtype.h>

#include <cstdint>
#include <span>
#include <vector>

namespace cohort::comm {

/// The order of a fold.
enum class FoldOrder : std::uint8_t {
  Ascending,
  /// A balanced binary tree over the inputs: a range is divided at the largest power of two below its length. So each
  /// aligned block of kFoldBlock inputs, or of kFoldBlock such blocks, is a subtree that may be folded elsewhere: the
  /// total of a block is rounded to the element's type (for the whole, only the result is), and scales belong to the
  /// inputs.
  Tree,
};
inline constexpr std::size_t kFoldBlock = 16;
/// The order of folds over this many hosts, which also applies to the fold of a single block of them.
constexpr FoldOrder order_over(std::int64_t members) noexcept {
  return members <= static_cast<std::int64_t>(kFoldBlock) ? FoldOrder::Ascending : FoldOrder::Tree;
}

struct FoldJob {
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;          ///< a reduction for which `supports(dtype, op)` is true
  std::span<const void* const> inputs;  ///< if empty, the result is zero
  std::span<void* const> outputs;       ///< each is the same memory as an input, or disjoint from all inputs
  std::int64_t count = 0;               ///< elements
  /// One factor per input (a weight's share, a prescale, or their product); empty for no factors. Scalable types only.
  std::span<const double> scales = {};
  /// Divisor of the sum, with Average only. 0 stands for the number of inputs. A weighted average, whose scales add up
  /// to 1, needs 1. At most 2^24, so that the divisor is exact in every type.
  std::int64_t divisor = 0;
  /// Factor of the result. Scalable types only.
  double postscale = 1;
  /// Stores for outputs that are not also an input, with up to 64 inputs. Other outputs are written Cached: their lines
  /// are in the caches already, or there is little to gain.
  Stores stores = Stores::Cached;
  /// Set to true if a result is NaN or infinite, else left unchanged; null for no check. Results are checked while they
  /// are in the first-level cache.
  bool* non_finite = nullptr;
  FoldOrder order = FoldOrder::Ascending;
};

/// Folds. Elements may have any alignment. Throws InvalidArgument if the type does not support the reduction, if there
/// are factors but the type is not scalable, if the number of scales is not that of the inputs, or if the divisor is
/// negative or too large. Otherwise it cannot fail, and it never allocates.
void fold(const FoldJob& job);

/// The members of a weighted average and their fractions. Ranks of weight 0 are left out. If the others have equal
/// weights, this is the plain average and `fractions` is empty; else the fractions add up to 1.
struct Weighting {
  std::vector<int> members;  ///< positions in `weights` of the ranks that are not left out, ascending
  std::vector<double> fractions;
};
/// Computes the weighting. Weights are finite and >= 0.
Weighting weigh(std::span<const double> weights);
/// The same, but does not allocate if `into` has had as many members before.
void weigh(std::span<const double> weights, Weighting& into);

// The kernels behind `fold`, one for each type and reduction, by family; each family is a file that is compiled once
// per instruction set. A kernel may assume that the job is valid, that it has at least one input, output and element,
// that it asks for ordinary stores, that it has at most kFoldBlock inputs if its order is Tree, and that the thread's
// floating-point mode is the IEEE default.
using FoldKernel = void (*)(const FoldJob& job);

/// The kernel for the instruction set in use; null for types of another family and for unsupported reductions.
FoldKernel find_float_kernel(DType dtype, ReduceOp op);    // float32, float64, complex64, complex128
FoldKernel find_half_kernel(DType dtype, ReduceOp op);     // float16, bfloat16
FoldKernel find_integer_kernel(DType dtype, ReduceOp op);  // integers, bool

}  // namespace cohort::comm
