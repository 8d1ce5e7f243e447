// The one list of the options of DistributedDataParallel, from which their comparison between ranks, their checks and
// their Python form follow. Pure functions; any thread.
#pragma once

#include "train/step/agreement.h"

#include <cohort/gradients.h>

#include <array>
#include <string_view>
#include <vector>

namespace cohort::gradients {

/// Calls visit(name, option) for each option that has a value in C++ and in Python. Does not compile with an option
/// that is not listed.
template <class Options, class Visit>
void visit_options(Options& options, Visit&& visit) {
  // `sampler` and `samples` are not visited: wrappers compare them. Each rank has its own `observer`.
  auto& [bucket_bytes, first_bucket_bytes, broadcast_buffers, wire_format, error_feedback, non_finite,
         compare_parameters_every, sampler, samples, check_replicas, sharding, protect_parameters, virtual_ranks,
         compute_threads, observer] = options;
  visit("bucket_bytes", bucket_bytes);
  visit("first_bucket_bytes", first_bucket_bytes);
  visit("broadcast_buffers", broadcast_buffers);
  visit("wire_format", wire_format);
  visit("error_feedback", error_feedback);
  visit("non_finite", non_finite);
  visit("compare_parameters_every", compare_parameters_every);
  visit("check_replicas", check_replicas);
  visit("sharding", sharding);
  visit("protect_parameters", protect_parameters);
  visit("virtual_ranks", virtual_ranks);
  visit("compute_threads", compute_threads);
}

/// Names of an enumeration's values, in their order.
constexpr std::array<std::string_view, 2> names_of(nn::NonFinite) noexcept { return {"ignore", "raise"}; }
constexpr std::array<std::string_view, 4> names_of(nn::Sharding) noexcept {
  return {"none", "optimizer", "gradients", "parameters"};
}

/// Number of threads that torch's operations are given; 0: they keep theirs.
inline std::int64_t threads_of(const nn::DistributedDataParallelOptions& options) noexcept {
  return options.compute_threads.value_or(options.virtual_ranks > 0 ? 1 : 0);
}

/// Returns the options, which all have to be the same on all ranks. Throws InvalidArgument for impossible values.
std::vector<step::Option> agreed(const nn::DistributedDataParallelOptions& options);

}  // namespace cohort::gradients
