// The one list of the options of DistributedDataParallel: their comparison between ranks, their checks and Python's
// form of them follow from it. Pure functions; any thread.
#pragma once

#include "train/step/agreement.h"

#include <cohort/gradients.h>

#include <array>
#include <string_view>
#include <vector>

namespace cohort::gradients {

/// Calls visit(name, option) for each option that has a value in both languages. Does not compile with an option that
/// is not listed.
template <class Options, class Visit>
void visit_options(Options& options, Visit&& visit) {
  // Wrappers compare `sampler` and `samples`, the weights, in their own words. Each rank has an `observer` of its own.
  auto& [bucket_bytes, first_bucket_bytes, broadcast_buffers, wire_format, error_feedback, non_finite,
         compare_parameters_every, sampler, samples, check_replicas, sharding, protect_parameters, observer] = options;
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
}

/// Names of an enumeration's values, in their order.
constexpr std::array<std::string_view, 2> names_of(nn::NonFinite) noexcept { return {"ignore", "raise"}; }
constexpr std::array<std::string_view, 4> names_of(nn::Sharding) noexcept {
  return {"none", "optimizer", "gradients", "parameters"};
}

/// The options, all of which have to be the same on all ranks. Throws InvalidArgument for values that cannot be.
std::vector<step::Option> agreed(const nn::DistributedDataParallelOptions& options);

}  // namespace cohort::gradients
