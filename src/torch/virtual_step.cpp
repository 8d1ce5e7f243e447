#include "torch/virtual_step.h"

#include "base/result.h"
#include "torch/module_slots.h"
#include "train/gradients/virtual_ranks.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace cohort::nn {

void assign_buffer(const at::Tensor& buffer, const void* values) {
  const at::NoGradGuard no_grad;
  if (buffer.is_contiguous()) {
    if (buffer.nbytes() > 0) std::memcpy(buffer.data_ptr(), values, buffer.nbytes());
    return;
  }
  const at::Tensor flat = at::empty(buffer.sizes(), buffer.options().requires_grad(false));
  std::memcpy(flat.data_ptr(), values, flat.nbytes());
  buffer.detach().copy_(flat);
}

std::vector<at::Tensor> VirtualStep::copies_of_buffers() const {
  std::vector<at::Tensor> copies;
  visit_buffers(*module_, [&](const at::Tensor& buffer) {
    copies.push_back(buffer.defined() ? buffer.detach().clone(at::MemoryFormat::Contiguous) : at::Tensor());
  });
  return copies;
}

void VirtualStep::set_buffers(const std::vector<at::Tensor>& values) {
  std::size_t at = 0;
  bool same = true;
  const auto is_same = [&](const at::Tensor& buffer) {
    if (at >= values.size() || buffer.defined() != values[at].defined()) return false;
    return !buffer.defined() ||
           (buffer.sizes() == values[at].sizes() && buffer.scalar_type() == values[at].scalar_type());
  };
  visit_buffers(*module_, [&](const at::Tensor& buffer) {
    same = same && is_same(buffer);
    if (same && buffer.defined()) assign_buffer(buffer, values[at].data_ptr());
    ++at;
  });
  if (same && at == values.size()) return;
  raise(ErrorCode::InvalidArgument,
        "DistributedDataParallel: a buffer was added, removed or given another shape or type within a step of "
        "virtual_ranks, each of which begins with the same buffers -- do it between two steps");
}

void VirtualStep::begin_forward(Reducer& reducer, const Place& place, bool begins_step) {
  gradients::Reducer& core = reducer.core();
  const int due = core.virtual_part()->ranks().due();
  if (at::get_num_threads() != threads_) {
    raise(
        ErrorCode::InvalidArgument,
        "DistributedDataParallel: torch has {} threads now, and had {} when the model was wrapped: with virtual_ranks "
        "the bits depend on that -- leave at::set_num_threads alone, and give compute_threads",
        at::get_num_threads(), threads_);
  }
  if (begins_step && accepted_ && place == place_) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: the sampler's position is that of the last step, which was taken -- call the "
          "sampler's step() after each batch");
  }
  if (!begins_step && place != place_) {
    raise(
        ErrorCode::InvalidArgument,
        "DistributedDataParallel: the sampler has moved on within a step, before a forward of virtual rank {} -- each "
        "virtual rank has one batch of the sampler: divide that into micro-batches",
        due);
  }
  if (begins_step) {
    reducer.note_begin();
    place_ = place;
    accepted_ = false;
    at_begin_ = copies_of_buffers();
    after_first_.clear();
  } else if (const std::string* const name = reducer.changed_parameter()) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: parameter '{}' was changed, or frozen, within a step, before virtual rank {} -- "
          "let the optimizer step where step_complete() is true, and nothing else change parameters in between",
          *name, due);
  }
  // A forward that has thrown may be tried again, if it was the first.
  if (begins_step || !core.accumulation().has_forward() || (failed_ && forwards_ == 1)) {
    if (!begins_step) set_buffers(at_begin_);
    part_ = due;
    forwards_ = 0;
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(gradients::virtual_seed(place.seed, place.epoch, place.cursor, due));
  }
  ++forwards_;
  failed_ = true;
}

void VirtualStep::end_backward(gradients::Reducer& core) {
  if (part_ < 0) return;
  if (core.in_step()) {
    if (part_ == 0 && core.virtual_part()->ranks().due() != 0 && after_first_.empty())
      after_first_ = copies_of_buffers();
    return;
  }
  accepted_ = core.step_complete();
  if (!after_first_.empty()) set_buffers(std::exchange(after_first_, {}));
  part_ = -1;
}

}  // namespace cohort::nn
