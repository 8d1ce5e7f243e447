// How the reducer finds gradients that are not finite, and tells of them.
#include "train/gradients/reducer.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace cohort::gradients {

// On one host a large gradient that is reduced out of where autograd made it is not looked at before, which would be to
// read it once more: whoever makes a part of the average looks at that, and the gradient is still there afterwards.
bool Reducer::looks_at_averages() const {
  return options_.non_finite == nn::NonFinite::Raise && ranks_->size() > 1 && ranks_->local_size() == ranks_->size();
}

FiniteOptions Reducer::finite_options() const {
  FiniteOptions options;
  if (ranks_->local_size() < ranks_->size()) options.wire_dtype = options_.wire_dtype;
  return options;
}

const void* Reducer::gradient_of(std::size_t parameter) const {
  const State& state = states_[parameter];
  return state.unread != nullptr ? state.unread : place_of(parameter).data;
}

// Right before the reduction, which reads the same memory next. What is found is told by a flag: no rank needs another
// message as long as there is nothing to tell.
void Reducer::look_for_non_finite(std::size_t number) {
  if (options_.non_finite == nn::NonFinite::Ignore || accumulation_.weight() == 0 || non_finite_) return;
  const Bucket& bucket = buckets_[number];
  if (bucket.on_gpu()) return look_on_gpu(number);
  const FiniteOptions options = finite_options();
  for (const std::size_t position : bucket.large()) {
    const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
    if (states_[parameter].unread != nullptr && looks_at_averages()) continue;
    const Buffer place = bucket.place(position);
    if (!first_non_finite(ConstBuffer(gradient_of(parameter), place.count, place.dtype), options)) continue;
    return note_non_finite(number, parameter);
  }
  const auto found = first_non_finite(bucket.small(), options);
  if (found) note_non_finite(number, static_cast<std::size_t>(bucket.members()[bucket.position_of(*found)]));
}

// The host waits for what the GPU finds. What would be infinite on the way alone is not looked for.
void Reducer::look_on_gpu(std::size_t number) {
  const Bucket& bucket = buckets_[number];
  if (autograd_.are_finite(bucket.members())) return;
  std::vector<std::size_t> positions(bucket.members().size());
  std::iota(positions.begin(), positions.end(), 0U);
  std::sort(positions.begin(), positions.end(),
            [&](std::size_t a, std::size_t b) { return bucket.offset(a) < bucket.offset(b); });
  for (const std::size_t position : positions) {
    const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
    const std::vector<std::byte> values = autograd_.copy_to_host(parameter);
    if (auto found = first_in(values.data(), parameters_[parameter], {}))
      return note_non_finite(number, parameter, *std::move(found));
  }
}

// Some average is not finite, so this rank looks at what it has not looked at.
void Reducer::look_for_non_finite_again() {
  if (accumulation_.weight() == 0) return;
  const std::size_t end = non_finite_ ? non_finite_->bucket + 1 : buckets_.size();
  for (std::size_t number = 0; number < end; ++number) {
    for (const std::size_t position : buckets_[number].large()) {
      const auto parameter = static_cast<std::size_t>(buckets_[number].members()[position]);
      const Buffer place = buckets_[number].place(position);
      const void* const unread = states_[parameter].unread;
      if (unread == nullptr || !first_non_finite(ConstBuffer(unread, place.count, place.dtype), finite_options())) {
        continue;
      }
      return note_non_finite(number, parameter);
    }
  }
}

void Reducer::note_non_finite(std::size_t bucket, std::size_t parameter) {
  note_non_finite(bucket, parameter,
                  first_in(gradient_of(parameter), parameters_[parameter], finite_options()).value());
}

void Reducer::note_non_finite(std::size_t bucket, std::size_t parameter, NonFiniteElement element) {
  non_finite_ =
      LocalNonFinite{.bucket = bucket, .parameter = static_cast<int>(parameter), .element = std::move(element)};
}

// The reductions are over, so all ranks have come here: each knows from the flags, or from the averages, that there may
// be something to tell. An average of finite gradients that is not finite is not.
void Reducer::raise_non_finite() {
  auto gradient = first_of_all_ranks(*ranks_, parameters_, std::exchange(non_finite_, std::nullopt), progress_ - 1);
  if (!gradient) return;
  ++stats_.non_finite_steps;
  autograd_.drop_all();
  ErrorContext where = ranks_->where("DistributedDataParallel");
  where.peer = gradient->rank;
  const auto named = [&](const Parameter& parameter) { return parameter.name == gradient->parameter; };
  std::size_t number = 0;
  while (!named(parameters_[number])) ++number;
  const std::string text = text_of(*gradient, parameters_[number].sizes);
  throw NonFiniteError(text, std::move(where), std::move(*gradient));
}

}  // namespace cohort::gradients
