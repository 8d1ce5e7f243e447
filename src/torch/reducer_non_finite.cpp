// How the reducer finds gradients that are not finite, and tells of them.
#include "torch/reducer.h"

#include <cohort/torch/finite.h>

#include <utility>

namespace cohort::nn {

// Right before the reduction, which reads the same memory next. What is found is told by the flag of this bucket and
// all later ones: no rank needs another message as long as there is nothing to tell.
void Reducer::look_for_non_finite(std::size_t bucket) {
  if (options_.non_finite == NonFinite::Ignore || samples_ == 0 || non_finite_) return;
  const std::vector<int>& members = plan_[bucket];
  const auto parameter_at = [&](std::size_t position) -> const Parameter& {
    return parameters_[static_cast<std::size_t>(members[position])];
  };
  FiniteOptions finite;
  if (comm_.local_size() < comm_.size()) finite.wire_dtype = options_.wire_dtype;
  const auto position =
      buckets_[bucket].first_non_finite([&](std::size_t at) { return parameter_at(at).unread; }, finite);
  if (!position) return;
  const Parameter& parameter = parameter_at(*position);
  const at::Tensor& gradient = parameter.unread.defined() ? parameter.unread : place_of(parameter);
  const std::optional<NonFiniteElement> element = cohort::first_non_finite(gradient, finite);
  non_finite_ = LocalNonFinite{.bucket = bucket, .parameter = members[*position], .element = element.value()};
}

// The reductions are over, so all ranks have come here: each knows from the last flag that there is something to tell.
void Reducer::raise_non_finite() {
  ++stats_.non_finite_steps;
  zero_grad();
  const FirstNonFinite first = first_of_all_ranks(comm_, std::exchange(non_finite_, std::nullopt));
  const Parameter& parameter = parameters_[static_cast<std::size_t>(first.parameter)];
  NonFiniteGradient gradient{.rank = first.rank,
                             .host = first.host,
                             .parameter = parameter.name,
                             .element = element_of(first.index, parameter.tensor.sizes(), first.value),
                             .step = progress_ - 1};
  throw_non_finite(comm_, std::move(gradient), parameter.tensor.sizes());
}

}  // namespace cohort::nn
