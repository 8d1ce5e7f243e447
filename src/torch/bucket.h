// Where gradients lie: buckets of several gradients each, in communicator memory, every bucket one all_reduce. A bucket
// is [gradients, each aligned | one flag per parameter: this rank used it | one flag: this rank has samples], all of
// one type, so that the flags are averaged by the same operation. A bucket owns its memory together with the tensors
// over it. One thread at a time.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

#include <cstdint>
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

  /// Flags: one per parameter, then the one for the rank itself. Non-zero after the reduction if it was set on any rank
  /// of weight > 0.
  void set_flag(std::size_t position, bool value);
  bool flag(std::size_t position) const;
  std::size_t rank_flag() const { return gradients_.size(); }

  /// The whole bucket, for its all_reduce.
  Buffer buffer() const { return {memory_.data(), elements_, dtype_}; }
  const void* data() const { return memory_.data(); }
  std::size_t bytes() const { return buffer().bytes(); }

 private:
  Memory memory_;
  at::ScalarType type_;
  DType dtype_;
  std::int64_t elements_ = 0;
  std::int64_t flags_begin_ = 0;  // in elements
  std::vector<at::Tensor> gradients_;
  std::vector<std::size_t> offsets_;  // in bytes
};

}  // namespace cohort::nn
