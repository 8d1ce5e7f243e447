// Which ranks a reduction folds, and by what each is multiplied first. Belongs to the thread that runs operations.
#pragma once

#include "comm/control/agreement.h"
#include "comm/kernels/fold.h"

#include <cstdint>
#include <vector>

namespace cohort::comm {

class Contributors {
 public:
  /// Of the operation that all have agreed on. Does not allocate once it has been used.
  void set(const Agreement& agreement);

  const std::vector<int>& ranks() const noexcept { return ranks_; }  ///< ascending
  std::int64_t count() const noexcept { return static_cast<std::int64_t>(ranks_.size()); }
  /// One factor for each of them, or none.
  const std::vector<double>& scales() const noexcept { return scales_; }
  double scale(std::size_t position) const noexcept { return scales_.empty() ? 1 : scales_[position]; }
  /// Of an average.
  std::int64_t divisor() const noexcept { return divisor_; }

 private:
  std::vector<int> ranks_;
  std::vector<double> scales_;
  std::int64_t divisor_ = 1;
  std::vector<double> weights_;
  Weighting weighting_;
};

}  // namespace cohort::comm
