// Which gradients are reduced together, and where each lies in its bucket. Pure.
#pragma once

#include <cohort/buffer.h>
#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort::gradients {

/// A parameter, as far as its gradient is concerned. Every gradient is dense: its strides say in which order of
/// dimensions it lies.
struct Parameter {
  std::string name;
  DType dtype = DType::Float32;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  Device device = {};  ///< without its stream

  std::int64_t count() const noexcept;
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count()) * size_of(dtype); }
};

/// One bucket of a plan: numbers of parameters, in their order within the bucket.
using BucketPlan = std::vector<std::vector<int>>;

struct PlanOptions {
  std::size_t first_bucket_bytes = 0;
  std::size_t bucket_bytes = 0;
};

/// Fills buckets with the parameters in the order in which their gradients are expected; a bucket is closed by the
/// parameter that brings it to its size. The first bucket of each type and device is the small one. Buckets are ordered
/// by when they are complete.
BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const int> order, const PlanOptions& options);

}  // namespace cohort::gradients
