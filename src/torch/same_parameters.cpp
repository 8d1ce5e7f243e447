#include <cohort/torch/same_parameters.h>

#include "base/result.h"
#include "torch/reducer.h"
#include "train/gradients/ranks.h"

#include <string>

namespace cohort {

namespace {

std::string text_of(const at::Tensor& element) {
  if (at::isComplexType(element.scalar_type())) return {};
  return at::isFloatingType(element.scalar_type()) ? fmt::format("{}", element.item<double>())
                                                   : fmt::format("{}", element.item<std::int64_t>());
}

}  // namespace

void require_same_tensors(gradients::Ranks& ranks, const std::vector<NamedTensor>& tensors, std::int64_t step) {
  const at::NoGradGuard no_grad;
  std::vector<gradients::NamedValues> values;
  std::vector<at::Tensor> kept;  // copies of those that are not contiguous
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || named.tensor.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument, "require_same_parameters: {} is undefined or not dense", named.name);
    }
    const at::Tensor flat = kept.emplace_back(named.tensor.detach().cpu().contiguous().view({-1}));
    values.push_back({.name = named.name,
                      .sizes = named.tensor.sizes().vec(),
                      .element_size = static_cast<std::size_t>(flat.element_size()),
                      .bytes = {static_cast<const std::uint8_t*>(flat.data_ptr()), flat.nbytes()},
                      .text = [flat](std::int64_t index) { return text_of(flat[index]); }});
  }
  gradients::require_same_parameters(ranks, values, step);
}

void require_same_parameters(Communicator& comm, const std::vector<NamedTensor>& tensors,
                             const SameParametersOptions& options) {
  require_same_tensors(*gradients::ranks_of(comm), tensors, options.step);
}

}  // namespace cohort
