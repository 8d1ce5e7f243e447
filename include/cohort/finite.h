// Where is the first value that is NaN or infinite? For gradients before they are reduced, and for whoever looks for
// the place where a training went wrong. Reads memory that the caller owns, once, at its speed; any thread may call.
#pragma once

#include <cohort/buffer.h>

#include <cstdint>
#include <optional>

namespace cohort {

struct FiniteOptions {
  /// BFloat16: a float32 that becomes infinite when it is rounded to bfloat16, as AllReduceOptions::wire_dtype does
  /// between hosts, counts as well (from 3.3961775e38 on). Other types ignore it.
  std::optional<DType> wire_dtype = {};
};

/// The number of the first element that is NaN, infinite, or too large for `wire_dtype`; of complex numbers in either
/// part. nullopt if there is none, and for integers and Bool. Any alignment, any length; denormals are finite. Throws
/// InvalidArgument for a negative count, and for a wire_dtype that is not BFloat16.
std::optional<std::int64_t> first_non_finite(ConstBuffer data, const FiniteOptions& options = {});

}  // namespace cohort
