#include "cluster/sagemaker.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace cohort::cluster {
namespace {

using Names = std::vector<std::string>;

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

TEST(SageMaker, ReadsResourceConfig) {
  const auto all = parse_resource_config(R"({
    "current_host": "algo-2", "current_instance_type": "ml.p3.2xlarge", "current_group_name": "train",
    "hosts": ["algo-1", "algo-10", "algo-2"],
    "instance_groups": [
      {"instance_group_name": "train", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-10", "algo-2"]},
      {"instance_group_name": "data", "instance_type": "ml.c5.large", "hosts": ["algo-1"]}],
    "network_interface_name": "eth0", "topology": null})");
  ASSERT_TRUE(all) << all.error().what();
  EXPECT_EQ(all->current, "algo-2");
  EXPECT_EQ(all->hosts, (Names{"algo-1", "algo-10", "algo-2"}));  // the list's order, whatever it is
  EXPECT_EQ(all->network_interface, "eth0");
  ASSERT_EQ(all->groups.size(), 2U);
  EXPECT_EQ(all->groups[0].name, "train");
  EXPECT_EQ(all->groups[1].instance_type, "ml.c5.large");
  EXPECT_EQ(training_hosts(*all, "").value(), all->hosts);
  EXPECT_EQ(training_hosts(*all, "[]").value(), all->hosts);
  EXPECT_EQ(training_hosts(*all, R"(["train"])").value(), (Names{"algo-10", "algo-2"}));
  EXPECT_EQ(training_hosts(*all, R"(["data","train"])").value(), all->hosts);
  const auto none = training_hosts(*all, R"(["other"])");
  ASSERT_FALSE(none);
  EXPECT_CONTAINS(none.error().what(), "'other'");
}

TEST(SageMaker, ReadsTheVariables) {
  const auto all = parse_sagemaker_hosts(R"(["algo-1","algo-2"])", "algo-1");
  ASSERT_TRUE(all);
  EXPECT_EQ(all->hosts, (Names{"algo-1", "algo-2"}));
  EXPECT_FALSE(parse_sagemaker_hosts(R"(["algo-1"])", "algo-3"));
  EXPECT_FALSE(parse_sagemaker_hosts("algo-1,algo-2", "algo-1"));
  EXPECT_FALSE(parse_sagemaker_hosts(R"("algo-1")", "algo-1"));
}

TEST(SageMaker, RefusesTheRest) {
  const struct {
    const char* text;
    const char* why;
  } cases[] = {
      {"", "no JSON"},
      {"3", "no object"},
      {R"({"hosts":["a"]})", "current_host: it is missing"},
      {R"({"current_host":"a"})", "hosts: it is missing"},
      {R"({"current_host":1,"hosts":["a"]})", "current_host: no text"},
      {R"({"current_host":"a","hosts":"a"})", "no list"},
      {R"({"current_host":"a","hosts":["a",""]})", "item 1 is no text"},
      {R"({"current_host":"a","hosts":[]})", "there is none"},
      {R"({"current_host":"::1\u0000.example","hosts":["::1\u0000.example"]})", "no IPv6 address"},
      {R"({"current_host":"a","hosts":["a","a"]})", "'a' is there twice"},
      {R"({"current_host":"a","hosts":["b"]})", "'a' is not among them"},
      {R"({"current_host":"a","hosts":["a","b c"]})", "no host name has"},
      {R"({"current_host":"a","hosts":["a"],"network_interface_name":[]})", "network_interface_name"},
      {R"({"current_host":"a","hosts":["a"],"instance_groups":{}})", "no list"},
      {R"({"current_host":"a","hosts":["a"],"instance_groups":[3]})", "no object"},
      {R"({"current_host":"a","hosts":["a"],"instance_groups":[{"hosts":["a"]}]})", "without instance_group_name"},
      {R"({"current_host":"a","hosts":["a"],"instance_groups":[{"instance_group_name":"g"}]})", "has no hosts"},
      {R"({"current_host":"a","hosts":["a"],"instance_groups":[{"instance_group_name":"g","hosts":["z"]}]})", "'z' of"},
  };
  for (const auto& one : cases) {
    const auto all = parse_resource_config(one.text);
    ASSERT_FALSE(all) << one.text;
    EXPECT_EQ(all.error().code(), ErrorCode::InvalidArgument);
    EXPECT_CONTAINS(all.error().what(), one.why);
  }
  const auto deep = parse_resource_config(std::string(300'000, '['));
  ASSERT_FALSE(deep);
  EXPECT_CONTAINS(deep.error().what(), "more than 64 levels");
}

struct ConfigFile {
  std::string path = (std::filesystem::temp_directory_path() / fmt::format("cohort-config-{}", ::getpid())).string();
  explicit ConfigFile(std::string_view text) { std::ofstream(path, std::ios::binary) << text; }
  ~ConfigFile() { std::filesystem::remove(path); }
};

TEST(SageMaker, FindsTheFileWhereThereIsNoToolkit) {
  const ConfigFile file(R"({"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]})");
  Environment job = {{"TRAINING_JOB_NAME", "digits"}};
  add_resource_config(job, file.path);
  const auto detected = detect(job);
  ASSERT_TRUE(detected) << detected.error().what();
  EXPECT_EQ(detected->launcher, "SageMaker");
  EXPECT_EQ(detected->rank, 1);
  EXPECT_EQ(detected->size, 2);
  EXPECT_EQ(detected->address, (net::Address{"algo-1", 29500}));

  // What the toolkit says counts, and outside such a job nothing is read.
  Environment told = {{"TRAINING_JOB_NAME", "digits"}, {"SM_CURRENT_HOST", "a"}, {"SM_HOSTS", R"(["a"])"}};
  const Environment before = told;
  add_resource_config(told, file.path);
  EXPECT_EQ(told, before);
  Environment other;
  add_resource_config(other, file.path);
  EXPECT_TRUE(other.empty());
  add_resource_config(job = {{"TRAINING_JOB_NAME", "digits"}}, file.path + "-that-is-not-there");
  EXPECT_EQ(job.size(), 1U);
}

TEST(SageMaker, AFileThatMakesNoSenseIsAnError) {
  const ConfigFile file(R"({"current_host": "algo-2", "hosts": )");
  Environment job = {{"TRAINING_JOB_NAME", "digits"}};
  add_resource_config(job, file.path);
  const auto detected = detect(job);
  ASSERT_FALSE(detected);
  EXPECT_CONTAINS(detected.error().what(), "resourceconfig.json");
}

}  // namespace
}  // namespace cohort::cluster
