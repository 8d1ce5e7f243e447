// Where gradients lie: buckets of several gradients each, in communicator memory. A bucket is [large gradients | small
// ones | one flag per parameter: this rank used it | one flag: this rank has samples | one flag: this rank has found a
// value that is not finite], all of one type, each gradient aligned. A large gradient is an all_reduce of its own,
// which reads it where autograd made it and writes the average to its place here, so that most of it is never copied.
// The small ones are written to their places first, and are one all_reduce with the flags. A bucket owns its memory
// together with the tensors over it. One thread at a time.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>
#include <cohort/finite.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace cohort::nn {

/// One bucket of a plan: numbers of parameters, in their order within the bucket.
using BucketPlan = std::vector<std::vector<int>>;

struct PlanParameter {
  std::size_t bytes = 0;
  at::ScalarType type = at::kFloat;
};

struct PlanOptions {
  std::size_t first_bucket_bytes = 0;
  std::size_t bucket_bytes = 0;
};

/// Fills buckets with the parameters in the order in which their gradients are expected; a bucket is closed by the
/// parameter that brings it to its size. The first bucket of each type is the small one. Buckets are ordered by when
/// they are complete.
BucketPlan plan_buckets(std::span<const PlanParameter> parameters, std::span<const int> order,
                        const PlanOptions& options);

class Bucket {
 public:
  /// `parameters`: those of this bucket, in order. Throws Unavailable when there is no memory.
  Bucket(Communicator& comm, std::span<const at::Tensor> parameters);

  /// Tensors over the places of the gradients, made so that libtorch may detach and zero them in place.
  const at::Tensor& gradient(std::size_t position) const { return gradients_[position]; }
  std::size_t offset(std::size_t position) const { return offsets_[position]; }

  /// Flags: one per parameter, then the two for the rank itself. Non-zero after the reduction if it was set on any rank
  /// of weight > 0.
  void set_flag(std::size_t position, bool value);
  bool flag(std::size_t position) const;
  std::size_t rank_flag() const { return gradients_.size(); }
  std::size_t non_finite_flag() const { return gradients_.size() + 1; }

  /// Positions of the large gradients, in the order of their reductions.
  const std::vector<std::size_t>& large() const { return large_; }
  Buffer large_buffer(std::size_t position) const;
  /// Whether the reduction can take this instead of what lies at the gradient's place.
  bool can_read(std::size_t position, const at::Tensor& gradient) const;
  /// What is reduced after them: small gradients and flags.
  Buffer rest() const;
  /// Of a large gradient, what is reduced instead of what lies at its place; undefined: what lies there; empty: it is
  /// not to be looked at.
  using ReadInstead = std::function<std::optional<at::Tensor>(std::size_t position)>;
  /// The position of the first gradient with a value that is not finite, in the order in which they lie.
  std::optional<std::size_t> first_non_finite(const ReadInstead& read_instead, const FiniteOptions& options) const;
  const void* data() const { return memory_.data(); }
  std::size_t bytes() const { return static_cast<std::size_t>(elements_) * size_of(dtype_); }

 private:
  Memory memory_;
  at::ScalarType type_;
  DType dtype_;
  std::int64_t elements_ = 0;
  std::int64_t rest_begin_ = 0;   // in elements
  std::int64_t flags_begin_ = 0;  // in elements
  std::vector<std::size_t> large_;
  std::vector<at::Tensor> gradients_;
  std::vector<std::size_t> offsets_;  // in bytes
};

}  // namespace cohort::nn
