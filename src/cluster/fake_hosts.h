// COHORT_PRETEND_HOSTS: one machine plays several hosts, to try out what they do. Any thread.
#pragma once

#include "base/result.h"

#include <string_view>
#include <vector>

namespace cohort::cluster {

/// The host of each of `size` ranks, as the text divides them; empty if the text is. InvalidArgument names the
/// variable.
Result<std::vector<int>> divide_into_hosts(std::string_view text, int size);
/// By the environment; throws what is wrong with it.
std::vector<int> fake_hosts(int size);

}  // namespace cohort::cluster
