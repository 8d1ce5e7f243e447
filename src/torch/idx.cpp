#include <cohort/torch/idx.h>

#include <cohort/torch/tensor.h>

#include "train/formats/idx.h"

#include <cstring>

namespace cohort::data {

at::Tensor read_idx(const std::string& path) {
  const formats::IdxArray array = value_or_throw(formats::read_idx(path));
  at::Tensor tensor = at::empty(array.shape, at::TensorOptions().dtype(to_scalar_type(array.dtype)));
  if (!array.data.empty()) std::memcpy(tensor.data_ptr(), array.data.data(), array.data.size());
  return tensor;
}

}  // namespace cohort::data
