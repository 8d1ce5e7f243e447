// The tensors that a module and its submodules have registered, with a check, cheap enough for each step, whether they
// are still the same.
#pragma once

#include <cohort/torch/torch_api.h>

#include "train/step/trained.h"

#include <cstddef>
#include <string>
#include <unordered_set>
#include <vector>

namespace cohort::nn {

/// Calls `visit` with each registered parameter, in order; repeatedly if it is registered in several places. Does not
/// build names, as `named_parameters` does.
template <class Visit>
void visit_parameters(const torch::nn::Module& module, const Visit& visit) {
  struct Registered final : torch::nn::Module {
    static const auto& of(const torch::nn::Module& one) { return one.*(&Registered::parameters_); }
  };
  for (const auto& item : Registered::of(module)) visit(item.value());
  for (const auto& child : module.children()) visit_parameters(*child, visit);
}

/// Like visit_parameters, for buffers.
template <class Visit>
void visit_buffers(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& item : module.named_buffers(/*recurse=*/false)) visit(item.value());
  for (const auto& child : module.children()) visit_buffers(*child, visit);
}

/// Returns the parameters of a module, each once, in the form in which ranks compare them.
inline std::vector<step::Shown> shown_of(const torch::nn::Module& module) {
  std::vector<step::Shown> shown;
  std::unordered_set<const void*> seen;  // a module registered twice lists its parameters twice
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    shown.push_back({.name = item.key(),
                     .identity = tensor.unsafeGetTensorImpl(),
                     .type = at::toString(tensor.scalar_type()),
                     .device = tensor.device().str(),
                     .sizes = tensor.sizes().vec(),
                     .requires_grad = tensor.requires_grad()});
  }
  return shown;
}

/// Tensors in the order of a visit. Holds them, so that no new tensor gets the address of a destroyed one.
class Slots {
 public:
  void take(const at::Tensor& tensor) { tensors_.push_back(tensor); }
  void clear() { tensors_.clear(); }
  /// True if a visit yields other tensors than these.
  template <class Walk>
  bool changed(const Walk& walk) const {
    std::size_t at = 0;
    bool same = true;
    walk([&](const at::Tensor& tensor) {
      same = same && at < tensors_.size() && tensors_[at].is_same(tensor);
      ++at;
    });
    return !same || at != tensors_.size();
  }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace cohort::nn
