// The kernels behind `fold`, one for each type and reduction, by family; each family is a file that is compiled once
// per instruction set. A kernel may assume what FoldJob demands, at least one input, output and element, ordinary
// stores, and IEEE defaults in the thread's floating-point mode. Pure functions; any thread may call.
#pragma once

#include "comm/kernels/fold.h"

namespace cohort::comm {

using FoldKernel = void (*)(const FoldJob& job);

/// The kernel for the instruction set in use; null for types of another family and for what the type does not have.
FoldKernel find_float_kernel(DType dtype, ReduceOp op);    // float32, float64, complex64, complex128
FoldKernel find_half_kernel(DType dtype, ReduceOp op);     // float16, bfloat16
FoldKernel find_integer_kernel(DType dtype, ReduceOp op);  // integers, bool

}  // namespace cohort::comm
