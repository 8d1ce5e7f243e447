#include "comm/control/contributors.h"

#include <cohort/dtype.h>

#include <algorithm>

namespace cohort::comm {

void Contributors::set(const Agreement& agreement) {
  const Descriptor& agreed = agreement.agreed;
  scales_.clear();
  if (agreed.weighted != 0) {
    weights_.clear();
    for (const int rank : agreement.active) weights_.push_back(agreement.of(rank).weight);
    weigh(weights_, weighting_);
    ranks_.clear();
    for (const int member : weighting_.members) ranks_.push_back(agreement.active[static_cast<std::size_t>(member)]);
    scales_ = weighting_.fractions;
  } else {
    ranks_ = agreement.active;
  }
  divisor_ = scales_.empty() ? std::max<std::int64_t>(count(), 1) : 1;  // fractions add up to 1
  if (agreed.prescale != 1 && is_scalable(agreed.dtype)) {
    scales_.resize(ranks_.size(), 1);
    for (double& scale : scales_) scale *= agreed.prescale;
  }
}

}  // namespace cohort::comm
