#include "named/fusion.h"

#include <algorithm>

namespace cohort::named {
namespace {

std::size_t bytes_of(const Agreed& one) noexcept {
  return static_cast<std::size_t>(one.common.count()) * size_of(one.common.dtype);
}

bool fusible(const Agreed& one) noexcept {
  if (one.common.kind != Kind::AllReduce && one.common.kind != Kind::Broadcast) return false;
  return one.common.device != DeviceType::CPU || bytes_of(one) <= kFusedTensor;
}

bool alike(const Signature& a, const Signature& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.prescale == b.prescale &&
         a.postscale == b.postscale && a.device == b.device;
}

}  // namespace

std::vector<Batch> plan_fusion(std::span<const AgreedPtr> ready, std::size_t threshold) {
  struct Open {
    std::size_t batch;
    std::size_t bytes;
  };
  std::vector<Batch> batches;
  std::vector<Open> open;  // batches that more may go into: one for each that is alike
  for (std::size_t i = 0; i < ready.size(); ++i) {
    if (!fusible(*ready[i])) {
      batches.push_back({i});
      continue;
    }
    const std::size_t bytes = bytes_of(*ready[i]);
    const auto found = std::find_if(open.begin(), open.end(), [&](const Open& one) {
      return alike(ready[batches[one.batch].front()]->common, ready[i]->common);
    });
    if (found != open.end() && found->bytes + bytes <= threshold) {
      batches[found->batch].push_back(i);
      found->bytes += bytes;
      continue;
    }
    batches.push_back({i});
    const Open made{batches.size() - 1, bytes};
    if (found != open.end()) {
      *found = made;
    } else {
      open.push_back(made);
    }
  }
  return batches;
}

}  // namespace cohort::named
