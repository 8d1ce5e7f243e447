// Which pairs of hosts measure at the same time: in each round every host is in one pair at most. Pure.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace cohort::doctor {

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

/// Each pair of `count` hosts once; or, if not `all`, each host with its neighbours in the circle.
std::vector<Pairs> rounds_of_pairs(std::size_t count, bool all);

}  // namespace cohort::doctor
