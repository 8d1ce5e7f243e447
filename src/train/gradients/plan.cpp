#include "train/gradients/plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace cohort::gradients {

std::int64_t Parameter::count() const noexcept {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const int> order, const PlanOptions& options) {
  struct Open {
    std::vector<int> members;
    std::size_t bytes = 0;
    bool first = true;
  };
  std::map<std::tuple<DType, DeviceType, int>, Open> open;
  BucketPlan plan;
  for (const int index : order) {
    const Parameter& parameter = parameters[static_cast<std::size_t>(index)];
    Open& bucket = open[{parameter.dtype, parameter.device.type, parameter.device.index}];
    bucket.members.push_back(index);
    bucket.bytes += parameter.bytes();
    if (bucket.bytes >= (bucket.first ? options.first_bucket_bytes : options.bucket_bytes)) {
      plan.push_back(std::move(bucket.members));
      bucket = Open{.members = {}, .bytes = 0, .first = false};
    }
  }
  // What is left open is complete when its last parameter is.
  std::vector<std::size_t> rank_in_order(parameters.size());
  for (std::size_t at = 0; at < order.size(); ++at) rank_in_order[static_cast<std::size_t>(order[at])] = at;
  for (auto& [kind, bucket] : open) {
    if (!bucket.members.empty()) plan.push_back(std::move(bucket.members));
  }
  std::stable_sort(plan.begin(), plan.end(), [&](const std::vector<int>& a, const std::vector<int>& b) {
    return rank_in_order[static_cast<std::size_t>(a.back())] < rank_in_order[static_cast<std::size_t>(b.back())];
  });
  return plan;
}

}  // namespace cohort::gradients
