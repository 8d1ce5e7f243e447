// Virtual ranks and libtorch's state (gradients.h, virtual_ranks): random numbers and buffers begin each virtual rank's
// part of a step alike, wherever it is trained. One thread per rank.
#pragma once

#include <cohort/torch/nn.h>

#include "torch/reducer.h"

#include <ATen/Parallel.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cohort::nn {

class VirtualStep {
 public:
  explicit VirtualStep(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  /// A step, for the seeds of its random numbers.
  struct Place {
    std::uint64_t seed = 0;
    std::int64_t epoch = 0;
    std::int64_t cursor = 0;
    friend bool operator==(const Place&, const Place&) = default;
  };
  /// Begins a forward. `begins_step`: the step's first one, with buffers that are the same on all ranks. Throws
  /// InvalidArgument if, since the step began, a parameter was changed, the sampler has moved, or torch got another
  /// number of threads; also if the sampler has not moved since the last step.
  void begin_forward(Reducer& reducer, const Place& place, bool begins_step);
  void end_forward() noexcept { failed_ = false; }
  /// Called when a backward has ended, well or not. After a step, buffers are those after virtual rank 0.
  void end_backward(gradients::Reducer& core);

 private:
  std::vector<at::Tensor> copies_of_buffers() const;
  void set_buffers(const std::vector<at::Tensor>& values);

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> at_begin_;     // buffers when the step began
  std::vector<at::Tensor> after_first_;  // and after virtual rank 0, once others follow it on this rank
  int part_ = -1;                        // the virtual rank that had the last forward
  int forwards_ = 0;                     // its forwards so far
  bool failed_ = false;                  // the last forward has not ended
  const int threads_ = at::get_num_threads();
  Place place_{.cursor = -1};  // of the step under way, or the last one
  bool accepted_ = false;      // the last step has ended well
};

/// Overwrites a buffer with contiguous values. Avoids copy_ where possible, since running statistics must not
/// invalidate an earlier pass's gradient.
void assign_buffer(const at::Tensor& buffer, const void* values);

}  // namespace cohort::nn
