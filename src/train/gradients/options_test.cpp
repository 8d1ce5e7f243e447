#include "train/gradients/options.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

namespace cohort::gradients {
namespace {

using Options = nn::DistributedDataParallelOptions;

std::map<std::string, std::string> agreed_of(const Options& options) {
  std::map<std::string, std::string> all;
  for (const step::Option& option : agreed(options)) all[option.name] = option.value;
  return all;
}

TEST(DataParallelOptions, EachIsComparedByItsNameAndValue) {
  const std::map<std::string, std::pair<std::function<void(Options&)>, std::string>> changes = {
      {"bucket_bytes", {[](Options& o) { o.bucket_bytes = 7; }, "7"}},
      {"first_bucket_bytes", {[](Options& o) { o.first_bucket_bytes = 7; }, "7"}},
      {"broadcast_buffers", {[](Options& o) { o.broadcast_buffers = false; }, "false"}},
      {"wire_format", {[](Options& o) { o.wire_format = WireFormat::BFloat16; }, "bfloat16"}},
      {"error_feedback", {[](Options& o) { o.error_feedback = false; }, "false"}},
      {"non_finite", {[](Options& o) { o.non_finite = nn::NonFinite::Raise; }, "raise"}},
      {"compare_parameters_every", {[](Options& o) { o.compare_parameters_every = 3; }, "3"}},
      {"check_replicas", {[](Options& o) { o.check_replicas = false; }, "false"}},
      {"sharding", {[](Options& o) { o.sharding = nn::Sharding::Parameters; }, "parameters"}},
      {"protect_parameters", {[](Options& o) { o.protect_parameters = true; }, "true"}},
      {"virtual_ranks", {[](Options& o) { o.virtual_ranks = 8; }, "8"}},
      {"compute_threads", {[](Options& o) { o.compute_threads = 3; }, "3"}}};
  for (const auto& [name, before] : agreed_of({})) {
    ASSERT_TRUE(changes.contains(name)) << name << " has no case here";
    const auto& [change, value] = changes.at(name);
    Options options;
    if (name == "protect_parameters") options.sharding = nn::Sharding::Parameters;
    std::map<std::string, std::string> expected = agreed_of(options);
    change(options);
    EXPECT_EQ(expected.at(name), before);
    expected[name] = value;
    if (name == "virtual_ranks") expected["compute_threads"] = "1";
    EXPECT_EQ(agreed_of(options), expected) << name;
  }
  EXPECT_EQ(agreed_of({}).size(), changes.size());
}

TEST(DataParallelOptions, ValuesThatCannotBeAreRefused) {
  for (const auto& [options, why] :
       {std::pair(Options{.bucket_bytes = 0}, "a bucket of 0 bytes"),
        std::pair(Options{.first_bucket_bytes = 0}, "a bucket of 0 bytes"),
        std::pair(Options{.compare_parameters_every = -1}, "compare_parameters_every=-1"),
        std::pair(Options{.sharding = nn::Sharding::Gradients, .protect_parameters = true}, "protect_parameters"),
        std::pair(Options{.wire_format = WireFormat::BFloat16, .error_feedback = true}, "error_feedback goes with"),
        std::pair(Options{.virtual_ranks = -1}, "virtual_ranks=-1"),
        std::pair(Options{.sharding = nn::Sharding::Optimizer, .virtual_ranks = 2}, "virtual_ranks with sharding"),
        std::pair(Options{.wire_format = WireFormat::BFloat16, .virtual_ranks = 2}, "virtual_ranks with wire_format"),
        std::pair(Options{.error_feedback = false, .virtual_ranks = 2}, "virtual_ranks with error_feedback"),
        std::pair(Options{.compute_threads = -1}, "compute_threads=-1")}) {
    try {
      (void)agreed(options);
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace cohort::gradients
