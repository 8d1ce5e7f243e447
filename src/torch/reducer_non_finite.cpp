// How the reducer finds gradients that are not finite, and tells of them.
#include "torch/reducer.h"

#include <cohort/torch/finite.h>

#include <utility>

namespace cohort::nn {

// On one host a large gradient that is reduced out of where autograd made it is not looked at before, which would be to
// read it once more: whoever makes a part of the average looks at that, and the gradient is still there afterwards.
bool Reducer::looks_at_averages() const {
  return options_.non_finite == NonFinite::Raise && comm_.size() > 1 && comm_.local_size() == comm_.size();
}

// Right before the reduction, which reads the same memory next. What is found is told by the flag of this bucket and
// all later ones: no rank needs another message as long as there is nothing to tell.
void Reducer::look_for_non_finite(std::size_t bucket) {
  if (options_.non_finite == NonFinite::Ignore || samples_ == 0 || non_finite_) return;
  note_non_finite(bucket, buckets_[bucket].first_non_finite(
                              [&](std::size_t position) -> std::optional<at::Tensor> {
                                const at::Tensor& unread = parameter_at(bucket, position).unread;
                                if (unread.defined() && looks_at_averages()) return std::nullopt;
                                return unread;
                              },
                              finite_options()));
}

// Some average is not finite, so this rank looks at what it has not looked at.
void Reducer::look_for_non_finite_again() {
  if (samples_ == 0) return;
  const std::size_t end = non_finite_ ? non_finite_->bucket + 1 : buckets_.size();
  for (std::size_t bucket = 0; bucket < end; ++bucket) {
    for (const std::size_t position : buckets_[bucket].large()) {
      const at::Tensor& unread = parameter_at(bucket, position).unread;
      if (!unread.defined() || !cohort::first_non_finite(unread, finite_options())) continue;
      return note_non_finite(bucket, position);
    }
  }
}

void Reducer::note_non_finite(std::size_t bucket, std::optional<std::size_t> position) {
  if (!position) return;
  const Parameter& parameter = parameter_at(bucket, *position);
  const at::Tensor& gradient = parameter.unread.defined() ? parameter.unread : place_of(parameter);
  const std::optional<NonFiniteElement> element = cohort::first_non_finite(gradient, finite_options());
  non_finite_ = LocalNonFinite{.bucket = bucket, .parameter = plan_[bucket][*position], .element = element.value()};
}

FiniteOptions Reducer::finite_options() const {
  FiniteOptions options;
  if (comm_.local_size() < comm_.size()) options.wire_dtype = options_.wire_dtype;
  return options;
}

// The reductions are over, so all ranks have come here: each knows from the last flag, or from the averages, that there
// may be something to tell. An average of finite gradients that is not finite is not.
void Reducer::raise_non_finite() {
  const auto found = first_of_all_ranks(comm_, std::exchange(non_finite_, std::nullopt));
  if (!found) return;
  const FirstNonFinite& first = *found;
  ++stats_.non_finite_steps;
  zero_grad();
  const Parameter& parameter = parameters_[static_cast<std::size_t>(first.parameter)];
  NonFiniteGradient gradient{.rank = first.rank,
                             .host = first.host,
                             .parameter = parameter.name,
                             .element = element_of(first.index, parameter.tensor.sizes(), first.value),
                             .step = progress_ - 1};
  throw_non_finite(comm_, std::move(gradient), parameter.tensor.sizes());
}

}  // namespace cohort::nn
