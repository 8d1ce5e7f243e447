// Mixed precision in libtorch, like torch.autocast in Python: in a scope, operations of this thread that benefit run in
// a 16-bit type; weights and gradients keep their type. Header only; a scope belongs to one thread.
#pragma once

#include <cohort/torch/torch_api.h>

#include <ATen/autocast_mode.h>

namespace cohort::nn {

/// Use it for forward and loss, not for backward:
///
///   { nn::Autocast autocast; loss = loss_of(model->forward(x), y); }
///   loss.backward();
///
/// bfloat16 has float's range, so that no gradient vanishes and no loss scaling is needed. float16 needs it, and
/// libtorch has no GradScaler: scale the loss yourself. Scopes nest.
class Autocast {
 public:
  explicit Autocast(at::DeviceType device = at::kCPU, at::ScalarType type = at::kBFloat16)
      : device_(device), enabled_(is_enabled(device)), type_(type_of(device)) {
    set(true, type);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set(enabled_, type_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  static bool is_enabled(at::DeviceType device) { return at::autocast::is_autocast_enabled(device); }
  static at::ScalarType type_of(at::DeviceType device) { return at::autocast::get_autocast_dtype(device); }
  void set(bool enabled, at::ScalarType type) const {
    at::autocast::set_autocast_enabled(device_, enabled);
    at::autocast::set_autocast_dtype(device_, type);
  }
#else
  static bool is_enabled(at::DeviceType device) {
    return device == at::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
  }
  static at::ScalarType type_of(at::DeviceType device) {
    return device == at::kCPU ? at::autocast::get_autocast_cpu_dtype() : at::autocast::get_autocast_gpu_dtype();
  }
  void set(bool enabled, at::ScalarType type) const {
    device_ == at::kCPU ? at::autocast::set_cpu_enabled(enabled) : at::autocast::set_enabled(enabled);
    device_ == at::kCPU ? at::autocast::set_autocast_cpu_dtype(type) : at::autocast::set_autocast_gpu_dtype(type);
  }
#endif
  at::DeviceType device_;
  bool enabled_;
  at::ScalarType type_;
};

}  // namespace cohort::nn
