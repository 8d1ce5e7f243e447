// The first value of a tensor that is NaN or infinite, and the error that names the first such gradient of all ranks.
// Plain values. Any thread may call.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/error.h>
#include <cohort/finite.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort {

/// Takes any dense tensor, contiguous or not; integers are finite. Reads the tensor once. Throws InvalidArgument for a
/// tensor that is undefined, sparse, not on the CPU, or of a type that collectives do not know.
std::optional<NonFiniteElement> first_non_finite(const at::Tensor& tensor, const FiniteOptions& options = {});

}  // namespace cohort
