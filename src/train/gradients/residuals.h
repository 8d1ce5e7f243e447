// Errors from rounding this rank's gradients between hosts. They are added to the next gradients (error feedback; Seide
// et al. 2014, Karimireddy et al. 2019, arXiv 1901.09847), by parameter, in the order of the buckets. One thread per
// rank.
#pragma once

#include "train/gradients/buckets.h"
#include "train/step/kept.h"

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace cohort::gradients {

class Residuals final : public step::Kept {
 public:
  /// Lays the residuals out for new buckets. Each float32 parameter keeps its residuals, initially zero.
  void lay_out(const std::vector<Bucket>& buckets);
  /// Returns the residuals of a bucket's small gradients and of the gaps between them. Valid as long as `memory()`.
  float* of_small(std::size_t bucket) const { return memory_.get() + small_[bucket]; }
  /// Returns the residuals of a parameter; empty if it has none.
  std::span<float> of(std::size_t parameter) const;
  std::shared_ptr<const void> memory() const noexcept { return memory_; }

 private:
  struct Place {
    std::size_t begin = 0, count = 0;
  };
  void clear() override;

  std::shared_ptr<float> memory_;
  std::size_t count_ = 0;
  std::vector<std::size_t> small_;       // by bucket: where the residuals of small gradients begin
  std::map<std::size_t, Place> places_;  // by parameter
};

}  // namespace cohort::gradients
