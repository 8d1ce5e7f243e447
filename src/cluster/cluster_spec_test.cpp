#include <cohort/cluster_spec.h>
#include <cohort/error.h>

#include "cluster/tf_config.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace cohort {
namespace {

using Lists = std::map<std::string, std::vector<std::string>>;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing is refused";
  return {};
}

TEST(ClusterSpecTest, SaysWhoIsWhere) {
  const ClusterSpec spec(Lists{{"worker", {"a:1", "b:2"}}, {"ps", {"[fe80::1]:3"}}});
  EXPECT_EQ(spec.jobs(), (std::vector<std::string>{"ps", "worker"}));
  EXPECT_EQ(spec.num_tasks("worker"), 2);
  EXPECT_EQ(spec.task_address("worker", 1), "b:2");
  EXPECT_EQ(spec.task_indices("worker"), (std::vector<int>{0, 1}));
  EXPECT_EQ(spec.job_tasks("ps").at(0), "[fe80::1]:3");
  EXPECT_EQ(spec, ClusterSpec({{"worker", {{0, "a:1"}, {1, "b:2"}}}, {"ps", {{0, "[fe80::1]:3"}}}}));
  EXPECT_NE(spec, ClusterSpec());
  EXPECT_TRUE(ClusterSpec().empty());
}

TEST(ClusterSpecTest, ErrorsNameThePlace) {
  const ClusterSpec spec(Lists{{"worker", {"a:1"}}});
  EXPECT_EQ(refusal([&] { (void)spec.num_tasks("ps"); }), "ClusterSpec: there is no job 'ps'; the jobs are: worker");
  EXPECT_EQ(refusal([&] { (void)spec.task_address("worker", 3); }),
            "ClusterSpec: there is no task 3 of job 'worker', which has 1");
  EXPECT_NE(refusal([] { ClusterSpec(Lists{{"ps", {"a:1", "b"}}}); }).find("ClusterSpec: ps 1: "), std::string::npos);
  EXPECT_NE(refusal([] { ClusterSpec({{"ps", {{-1, "a:1"}}}}); }).find("ps -1"), std::string::npos);
  EXPECT_NE(refusal([] { ClusterSpec::from_tf_config(R"({"cluster":{"ps":[7]}})"); }).find("cluster, ps"),
            std::string::npos);
  EXPECT_NE(refusal([&] { (void)spec.to_tf_config("worker", 1); }).find("no task 1"), std::string::npos);
  EXPECT_NE(refusal([] {
              (void)ClusterSpec(Lists{{"chief", {"a:1", "b:1"}}}).to_tf_config("chief", 0);
            }).find("chief"),
            std::string::npos);
}

TEST(ClusterSpecTest, IsReadFromTfConfigAndWrittenIntoIt) {
  const ClusterSpec spec({{"chief", {{0, "a:1"}}}, {"worker", {{0, "b:1"}, {2, "d:1"}}}, {"ps", {{0, "c:1"}}}});
  const std::string text = spec.to_tf_config("ps", 0);
  EXPECT_EQ(ClusterSpec::from_tf_config(text), spec) << text;
  const auto config = cluster::parse_tf_config(text);
  ASSERT_TRUE(config) << text;
  EXPECT_EQ(config->task_type, "ps");
  EXPECT_FALSE(config->cluster.at("worker").listed);
  EXPECT_TRUE(config->cluster.at("chief").listed);
  // An evaluator stands beside it.
  EXPECT_EQ(cluster::parse_tf_config(spec.to_tf_config("evaluator", 0))->task_type, "evaluator");
  EXPECT_TRUE(ClusterSpec::from_tf_config("{}").empty());
}

}  // namespace
}  // namespace cohort
