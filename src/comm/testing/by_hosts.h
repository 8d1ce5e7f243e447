// For tests: the reduction of a world on several (pretended) hosts: each host's ranks are folded first, then the hosts.
// Pure, but for COHORT_PRETEND_HOSTS, which says where the ranks are.
#pragma once

#include "comm/kernels/reference_fold.h"
#include "comm/pretended_hosts.h"

#include <cstdint>
#include <vector>

namespace cohort::comm::testing {

/// `ranks[i]` of a world of `size` brought `inputs[i]`.
inline Bytes reference_by_hosts(DType dtype, ReduceOp op, const std::vector<int>& ranks, int size,
                                const std::vector<Bytes>& inputs, std::int64_t count, const Factors& factors = {}) {
  const std::vector<int> hosts = pretended_hosts(size);
  if (hosts.empty() || hosts.back() == 0) return reference_fold(dtype, op, inputs, count, factors);
  std::vector<Bytes> partials;
  for (int host = 0; host <= hosts.back(); ++host) {
    std::vector<Bytes> here;
    Factors own;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (hosts[static_cast<std::size_t>(ranks[i])] != host) continue;
      here.push_back(inputs[i]);
      if (!factors.scales.empty()) own.scales.push_back(factors.scales[i]);
    }
    if (here.empty()) continue;
    partials.push_back(reference_fold(dtype, op == ReduceOp::Average ? ReduceOp::Sum : op, here, count, own));
  }
  Factors last;
  last.divisor = factors.divisor != 0 ? factors.divisor : static_cast<std::int64_t>(ranks.size());
  last.postscale = factors.postscale;
  return reference_fold(dtype, op, partials, count, last);
}

}  // namespace cohort::comm::testing
