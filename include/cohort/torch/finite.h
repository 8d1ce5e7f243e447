// The first value of a tensor that is NaN or infinite, and the error that names the first such gradient of all ranks.
// Values; they own nothing of anybody else's. Any thread may call.
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

/// One element of a tensor.
struct NonFiniteElement {
  std::int64_t index = 0;              ///< in the order of the dimensions, the last one running fastest
  std::vector<std::int64_t> position;  ///< the same, one number per dimension; empty for a scalar
  double value = 0;                    ///< of a complex number the part that is not finite
};

/// Any dense CPU tensor, also one that is not contiguous; integers are finite. Reads it once. Throws InvalidArgument
/// for a tensor that is undefined, sparse, not on the CPU, or of a type that collectives do not know.
std::optional<NonFiniteElement> first_non_finite(const at::Tensor& tensor, const FiniteOptions& options = {});

/// A gradient that is not finite, the first one: of the bucket that is reduced first, there of the lowest rank, there
/// of the gradient that lies first.
struct NonFiniteGradient {
  int rank = -1;
  std::string host;       ///< that rank's
  std::string parameter;  ///< its name
  NonFiniteElement element;
  std::int64_t step = 0;  ///< synchronised steps before this one
};

/// Thrown on every rank, with the same text and gradient, before a gradient of the step can be used. `context().peer`
/// is the gradient's rank. The communicator and the model stay usable.
class NonFiniteError : public Error {
 public:
  NonFiniteError(const std::string& message, ErrorContext context, NonFiniteGradient gradient)
      : Error(ErrorCode::NonFinite, message, std::move(context)), gradient_(std::move(gradient)) {}
  const NonFiniteGradient& gradient() const noexcept { return gradient_; }

 private:
  NonFiniteGradient gradient_;
};

}  // namespace cohort
