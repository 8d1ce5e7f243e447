// For tests: the reduction of a world on several (fake) hosts: each host's ranks are folded first, then the hosts.
// Pure, but for COHORT_PRETEND_HOSTS, which says where the ranks are.
#pragma once

#include "comm/kernels/reference_fold.h"
#include "comm/testing/worlds.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cohort::comm::testing {

/// While it lives, references are of a group with these members of a world. Its hosts are numbered in the order in
/// which its ranks name them. One thread.
class OfGroup {
 public:
  OfGroup(const std::vector<int>& members, int world) {
    const std::vector<int> hosts = Worlds::chosen().hosts(world);
    std::vector<int> known;
    for (const int member : members) {
      if (hosts.empty()) break;
      const int host = hosts[static_cast<std::size_t>(member)];
      const auto found = std::find(known.begin(), known.end(), host);
      hosts_.push_back(static_cast<int>(found - known.begin()));
      if (found == known.end()) known.push_back(host);
    }
    current() = this;
  }
  ~OfGroup() { current() = nullptr; }
  OfGroup(const OfGroup&) = delete;
  OfGroup& operator=(const OfGroup&) = delete;

  /// Of the ranks of a world or group of `size`.
  static std::vector<int> hosts(int size) {
    return current() != nullptr ? current()->hosts_ : Worlds::chosen().hosts(size);
  }

 private:
  static const OfGroup*& current() {
    thread_local const OfGroup* group = nullptr;
    return group;
  }
  std::vector<int> hosts_;
};

/// `ranks[i]` of a world of `size` brought `inputs[i]`.
inline Bytes reference_by_hosts(DType dtype, ReduceOp op, const std::vector<int>& ranks, int size,
                                const std::vector<Bytes>& inputs, std::int64_t count, const Factors& factors = {}) {
  const std::vector<int> hosts = OfGroup::hosts(size);
  const int last_host = hosts.empty() ? 0 : *std::max_element(hosts.begin(), hosts.end());
  if (last_host == 0) return reference_fold(dtype, op, inputs, count, factors);
  std::vector<Bytes> partials;
  for (int host = 0; host <= last_host; ++host) {
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
