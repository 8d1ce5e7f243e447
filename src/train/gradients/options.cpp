#include "train/gradients/options.h"

#include "base/result.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace cohort::gradients {

namespace {

void check_virtual_ranks(const nn::DistributedDataParallelOptions& options) {
  constexpr auto kWrong = ErrorCode::InvalidArgument;
  if (options.compute_threads.value_or(0) < 0)
    raise(kWrong, "DistributedDataParallel: compute_threads={} -- 0 leaves them as they are", *options.compute_threads);
  if (options.virtual_ranks < 0 || options.virtual_ranks > 1 << 20)
    raise(kWrong, "DistributedDataParallel: virtual_ranks={} -- 0 is without", options.virtual_ranks);
  if (options.virtual_ranks == 0) return;
  const auto refuse = [](const char* what, const char* why) {
    raise(kWrong, "DistributedDataParallel: virtual_ranks with {} -- {}; leave one out", what, why);
  };
  if (options.sharding != nn::Sharding::None) refuse("sharding", "whose owners depend on the number of ranks");
  if (options.wire_format != WireFormat::None) refuse("wire_format", "which rounds what each host sends");
  if (options.error_feedback) refuse("error_feedback", "which is each rank's own");
}

}  // namespace

std::vector<step::Option> agreed(const nn::DistributedDataParallelOptions& options) {
  constexpr auto kWrong = ErrorCode::InvalidArgument;
  if (options.bucket_bytes == 0 || options.first_bucket_bytes == 0)
    raise(kWrong, "DistributedDataParallel: a bucket of 0 bytes");
  if (options.compare_parameters_every < 0)
    raise(kWrong, "DistributedDataParallel: compare_parameters_every={} -- 0 is never",
          options.compare_parameters_every);
  if (options.protect_parameters && options.sharding != nn::Sharding::Parameters)
    raise(kWrong, "DistributedDataParallel: protect_parameters is for parameters that ranks share (sharding)");
  if (options.error_feedback.value_or(false) && options.wire_format <= WireFormat::BFloat16)
    raise(kWrong, "DistributedDataParallel: error_feedback goes with wire_format int8 and int4 alone");
  check_virtual_ranks(options);
  std::vector<step::Option> all;
  visit_options(options, [&]<class T>(const char* name, const T& value) {
    std::string text;
    if constexpr (std::is_same_v<T, std::optional<bool>>)
      text = value ? fmt::format("{}", *value) : "by format";
    else if constexpr (std::is_same_v<T, std::optional<std::int64_t>>)
      text = fmt::format("{}", threads_of(options));
    else if constexpr (std::is_same_v<T, WireFormat>)
      text = to_string(value);
    else if constexpr (std::is_enum_v<T>)
      text = names_of(value)[static_cast<std::size_t>(value)];
    else
      text = fmt::format("{}", value);
    all.push_back({.name = name, .value = std::move(text)});
  });
  return all;
}

}  // namespace cohort::gradients
