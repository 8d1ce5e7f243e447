#include "train/gradients/virtual_part.h"

#include "base/result.h"
#include "comm/kernels/fold.h"

#include <algorithm>
#include <cstring>

namespace cohort::gradients {

void VirtualPart::require_forward(const Accumulation& accumulation) const {
  if (accumulation.has_forward()) return;
  raise(ErrorCode::InvalidArgument,
        "DistributedDataParallel: a backward without a new forward, which would count as virtual rank {}'s -- with "
        "virtual_ranks each has one backward outside of no_sync: add losses before it, or run the others within "
        "no_sync, before it",
        ranks_.due());
}

void VirtualPart::begin_pass(std::size_t parameters, const Places& place_of) {
  ranks_.begin_step();
  if (std::exchange(begun_, true)) return;
  const bool first = !std::exchange(taken_, true);
  if (first) used_.assign(parameters, false);
  for (std::size_t i = 0; i < parameters; ++i) {
    // Adding to a gradient gives other bits than writing it, if only in the sign of a zero.
    if (!autograd_.put_in_place(i)) continue;
    if (first) {
      const Buffer place = place_of(i);
      const auto* const bytes = static_cast<const std::byte*>(place.data);
      before_.emplace_back(i, std::vector<std::byte>(bytes, bytes + place.bytes()));
    }
    autograd_.drop(i);
  }
}

void VirtualPart::note_used(std::size_t parameter, double weight) { used_[parameter] = used_[parameter] || weight > 0; }

void VirtualPart::end(double weight, const Accumulation& accumulation) {
  ranks_.end_part(weight);
  at_begin_ = accumulation;
  begun_ = false;
  if (ranks_.complete()) taken_ = false;
}

void VirtualPart::restart(Accumulation& accumulation) {
  accumulation.go_back_to(at_begin_);
  ranks_.restart_part();
  begun_ = false;
}

void VirtualPart::drop(Accumulation& accumulation) {
  ranks_.drop();
  before_.clear();
  begun_ = taken_ = false;
  at_begin_ = Accumulation();
  accumulation.go_back_to(at_begin_);
}

void VirtualPart::add_gradients_from_before(const StepMessage& message, const Places& place_of) {
  for (const auto& [parameter, bytes] : before_) {
    const Buffer place = place_of(parameter);
    if (!message.used(parameter)) {
      if (!bytes.empty()) std::memcpy(place.data, bytes.data(), bytes.size());
      autograd_.give(parameter);
    } else if (std::ranges::any_of(bytes, [](std::byte one) { return one != std::byte{0}; })) {
      const void* const inputs[] = {bytes.data(), place.data};
      void* const outputs[] = {place.data};
      comm::FoldJob job;
      job.dtype = place.dtype;
      job.inputs = inputs;
      job.outputs = outputs;
      job.count = place.count;
      comm::fold(job);
    }
  }
  before_.clear();
}

}  // namespace cohort::gradients
