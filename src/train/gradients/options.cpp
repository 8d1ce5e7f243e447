#include "train/gradients/options.h"

#include "base/result.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace cohort::gradients {

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
  std::vector<step::Option> all;
  visit_options(options, [&all]<class T>(const char* name, const T& value) {
    std::string text;
    if constexpr (std::is_same_v<T, std::optional<bool>>)
      text = value ? fmt::format("{}", *value) : "by format";
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
