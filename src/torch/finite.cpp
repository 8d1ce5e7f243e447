#include <cohort/torch/finite.h>

#include "base/result.h"
#include "train/gradients/non_finite.h"

#include <cohort/torch/tensor.h>

#include <cmath>

namespace cohort {

std::optional<NonFiniteElement> first_non_finite(const at::Tensor& tensor, const FiniteOptions& options) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) {
    raise(ErrorCode::InvalidArgument, "first_non_finite: the tensor is undefined or not dense -- use .to_dense()");
  }
  const at::Tensor values = tensor.detach().cpu().contiguous();
  const DType dtype = dtype_of(values);
  const auto index = first_non_finite({values.data_ptr(), values.numel(), dtype}, options);
  if (!index) return std::nullopt;
  const at::Tensor element = values.view({-1})[*index];
  double value = 0;
  if (at::isComplexType(values.scalar_type())) {
    const auto number = element.item<c10::complex<double>>();
    value = std::isfinite(number.real()) ? number.imag() : number.real();
  } else {
    value = element.item<double>();
  }
  return NonFiniteElement{.index = *index, .position = gradients::position_of(*index, tensor.sizes()), .value = value};
}

}  // namespace cohort
