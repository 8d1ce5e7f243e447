// Finds the first value that is NaN or infinite: in gradients before they are reduced, or when searching for the place
// where a training went wrong. Reads the caller's memory once, at memory speed; any thread may call.
#pragma once

#include <cohort/buffer.h>
#include <cohort/error.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort {

struct FiniteOptions {
  /// BFloat16: a float32 that becomes infinite when it is rounded to bfloat16, as AllReduceOptions::wire_format does
  /// between hosts, counts as well (from 3.3961775e38 on). Other types ignore it.
  WireFormat wire_format = WireFormat::None;
};

/// Returns the number of the first element that is NaN, infinite, or too large for `wire_format`, in either part of a
/// complex number. Returns nullopt if there is no such element, and for integers and Bool. Any alignment, any length;
/// denormals are finite. Throws InvalidArgument for a negative count.
std::optional<std::int64_t> first_non_finite(ConstBuffer data, const FiniteOptions& options = {});

/// One element of a tensor.
struct NonFiniteElement {
  std::int64_t index = 0;              ///< in the order of the dimensions, the last one running fastest
  std::vector<std::int64_t> position;  ///< position of that element, one number per dimension; empty for a scalar
  double value = 0;                    ///< the element's value; for a complex number, the part that is not finite
};

/// The first gradient that is not finite: earlier buckets come first, then lower ranks, then earlier positions in the
/// bucket.
struct NonFiniteGradient {
  int rank = -1;
  std::string host;       ///< host of that rank
  std::string parameter;  ///< name of the parameter
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
