// The reductions of a backward that have been started, in their order; and the sum of all ranks' weights, for hooks,
// which see whole buckets. One thread at a time.
#pragma once

#include "train/gradients/autograd.h"
#include "train/step/ranks.h"

#include <cohort/buffer.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace cohort::gradients {

class Reductions {
 public:
  /// `held`: bytes of the gradient that the operation reads where autograd made it, if nobody needs that gradient
  /// afterwards.
  void add(std::unique_ptr<step::Pending> work, const Device& result, std::size_t held = 0) {
    works_.push_back({std::move(work), result, held});
  }
  /// Waits until gradients that reductions hold, and `bytes` more, are no more than `limit`. Bounds memory: otherwise a
  /// rank that is ahead of the others might queue all of its gradients.
  void await_room(std::size_t bytes, std::size_t limit);
  /// Waits for all. `by_host`: also for reductions of GPU memory; else autograd's current stream waits for these.
  void wait(Autograd& autograd, bool by_host);
  /// Returns whether all averages that were checked are finite.
  bool are_finite() const;
  void clear() { works_.clear(); }

 private:
  struct Started {
    std::unique_ptr<step::Pending> work;
    Device device;  // the result's device
    std::size_t held = 0;
  };
  std::vector<Started> works_;
};

class TotalWeight {
 public:
  /// Starts the sum, which `wait` waits for when the first bucket is full.
  void start(step::Ranks& ranks, double own);
  double wait();

 private:
  std::shared_ptr<std::vector<double>> total_;
  std::unique_ptr<step::Pending> started_;
};

}  // namespace cohort::gradients
