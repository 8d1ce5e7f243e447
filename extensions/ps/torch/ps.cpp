#include <cohort/torch/ps.h>

#include "base/result.h"

#include <algorithm>
#include <span>

namespace cohort::ps {

namespace {

/// Values of a tensor that is known to be float32 and contiguous.
std::span<float> values_of(const at::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

void wait_for(std::vector<Work>& works) {
  for (Work& work : works) work.wait();
}

}  // namespace

DistributedOptimizer::DistributedOptimizer(Client& client,
                                           const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                                           const DistributedOptimizerOptions& options)
    : client_(client) {
  if (named_parameters.is_empty()) {
    raise(ErrorCode::InvalidArgument, "DistributedOptimizer: there are no parameters");
  }
  const auto& consistency = options.consistency;
  if (consistency.mode == Mode::Sync) scale_ = 1.0 / static_cast<double>(client.workers());
  for (const auto& [name, parameter] : named_parameters.pairs()) {
    if (parameter.scalar_type() != at::kFloat || parameter.layout() != at::kStrided || !parameter.is_contiguous() ||
        !parameter.is_cpu()) {
      raise(ErrorCode::InvalidArgument, "DistributedOptimizer: {} is not float32, contiguous and on the CPU", name);
    }
  }
  for (const auto& [name, parameter] : named_parameters.pairs()) {
    if (std::any_of(served_.begin(), served_.end(),
                    [&, &tensor = parameter](const Served& served) { return served.parameter.is_same(tensor); })) {
      continue;
    }
    served_.push_back(
        {name, parameter,
         client.variable(options.prefix + name,
                         {.elements = parameter.numel(), .optimizer = options.optimizer, .consistency = consistency})});
  }
  if (client.now() == 0) {  // else other workers have begun, with the servers' values
    if (client.worker() == 0) {
      std::vector<Work> works;
      for (Served& served : served_) works.push_back(served.variable.assign(values_of(served.parameter)));
      wait_for(works);
    }
    client.barrier();
  }
  pull();
}

void DistributedOptimizer::pull() {
  std::vector<Work> works;
  for (Served& served : served_) works.push_back(served.variable.pull(values_of(served.parameter)));
  wait_for(works);
}

void DistributedOptimizer::zero_grad(bool set_to_none) {
  for (const Served& served : served_) {
    at::Tensor& gradient = served.parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient = gradient.detach().zero_();
    }
  }
}

void DistributedOptimizer::step(const PushOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> kept;  // kept until they are pushed
  std::vector<Work> works;
  for (Served& served : served_) {
    const at::Tensor& gradient = served.parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument,
            "DistributedOptimizer: the gradient of {} is sparse -- make its module without sparse, or keep its rows in "
            "a table",
            served.name);
    }
    kept.push_back(scale_ == 1 ? gradient.contiguous() : gradient.contiguous() * scale_);
    works.push_back(served.variable.push(values_of(kept.back()), options));
  }
  wait_for(works);
  client_.clock();
  pull();
}

}  // namespace cohort::ps
