#include "train/gradients/buckets.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace cohort::gradients {
namespace {

RC_GTEST_PROP(BucketPlanTest, EveryParameterOnceByTypeAndInOrder, ()) {
  const auto sizes = *rc::gen::container<std::vector<int>>(rc::gen::inRange(1, 500));
  std::vector<Parameter> parameters;
  for (const int size : sizes) {
    parameters.push_back(
        {.name = "", .dtype = size % 3 == 0 ? DType::Int8 : DType::UInt8, .sizes = {size}, .strides = {1}});
  }
  std::vector<int> order(parameters.size());
  std::iota(order.rbegin(), order.rend(), 0);
  const BucketPlan plan = plan_buckets(parameters, order, {.first_bucket_bytes = 100, .bucket_bytes = 1000});
  std::vector<int> seen;
  int last_complete = std::numeric_limits<int>::max();
  for (const auto& bucket : plan) {
    RC_ASSERT(!bucket.empty());
    RC_ASSERT(bucket.back() < last_complete);  // reverse order: complete ever later
    last_complete = bucket.back();
    std::size_t bytes = 0;
    for (const int index : bucket) {
      RC_ASSERT(parameters[static_cast<std::size_t>(index)].dtype ==
                parameters[static_cast<std::size_t>(bucket[0])].dtype);
      bytes += parameters[static_cast<std::size_t>(index)].bytes();
      seen.push_back(index);
    }
    RC_ASSERT(bytes - parameters[static_cast<std::size_t>(bucket.back())].bytes() < 1000U);
  }
  std::sort(seen.rbegin(), seen.rend());
  RC_ASSERT(seen == order);
}

}  // namespace
}  // namespace cohort::gradients
