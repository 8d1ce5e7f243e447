#include "rendezvous/json_variables.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace cohort::rendezvous {
namespace {

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

Result<TfPlace> place_of(std::string_view text) {
  const auto config = parse_tf_config(text);
  if (!config) return tl::unexpected(config.error());
  return tf_place(*config);
}

TEST(TfConfig, SaysWhichRankATaskIs) {
  using Role = TfPlace::Role;
  const std::string workers = R"("cluster":{"worker":["h1:1","h2:2"]})";
  const std::string full =
      R"("cluster":{"chief":["c:1"],"worker":["w0:1","w1:1"],"ps":["p0:1","p1:1"],"evaluator":["e:1"]})";
  const struct {
    std::string text;
    Role role;
    int rank, size;
    std::string first;
  } cases[] = {
      {"{}", Role::Single, 0, 1, ""},
      {R"({"cluster":{},"task":{}})", Role::Single, 0, 1, ""},
      {R"({"task":{"type":"worker","index":0}})", Role::Single, 0, 1, ""},
      {"{" + workers + R"(,"task":{"type":"worker","index":0}})", Role::Rank, 0, 2, "h1:1"},
      {"{" + workers + R"(,"task":{"type":"worker","index":"1"},"rpc_layer":"grpc"})", Role::Rank, 1, 2, "h1:1"},
      {"{" + full + R"(,"task":{"type":"chief","index":0},"environment":"cloud"})", Role::Rank, 0, 3, "c:1"},
      {"{" + full + R"(,"task":{"type":"worker","index":0}})", Role::Rank, 1, 3, "c:1"},
      {"{" + full + R"(,"task":{"type":"worker","index":1}})", Role::Rank, 2, 3, "c:1"},
      {"{" + full + R"(,"task":{"type":"ps","index":1}})", Role::ParameterServer, 0, 1, "c:1"},
      {"{" + full + R"(,"task":{"type":"evaluator","index":0}})", Role::Evaluator, 0, 1, "c:1"},
      // The evaluator need not be in the cluster.
      {"{" + workers + R"(,"task":{"type":"evaluator","index":0}})", Role::Evaluator, 0, 1, "h1:1"},
      {R"({"cluster":{"evaluator":["e:1"]},"task":{"type":"evaluator","index":0}})", Role::Evaluator, 0, 1, ""},
      // TensorFlow's old name of the chief.
      {R"({"cluster":{"master":["m:1"],"worker":["w:1"]},"task":{"type":"master","index":0}})", Role::Rank, 0, 2,
       "m:1"},
      {R"({"cluster":{"master":["m:1"],"worker":["w:1"]},"task":{"type":"worker","index":0}})", Role::Rank, 1, 2,
       "m:1"},
      {R"({"cluster":{"chief":["c:1"]},"task":{"type":"chief","index":0}})", Role::Single, 0, 1, "c:1"},
      // An object from index to address that is complete.
      {R"({"cluster":{"worker":{"1":"b:1","0":"[::1]:7"}},"task":{"type":"worker","index":1}})", Role::Rank, 1, 2,
       "[::1]:7"},
      {R"({"cluster":{"chief":{"0":"c:1"},"worker":["w:1"]},"task":{"type":"worker","index":0}})", Role::Rank, 1, 2,
       "c:1"},
      {R"({"cluster":{"ps":{"1":"p:1"},"worker":["w:1"]},"task":{"type":"ps","index":1}})", Role::ParameterServer, 0, 1,
       "w:1"},
  };
  for (const auto& one : cases) {
    const auto place = place_of(one.text);
    ASSERT_TRUE(place) << one.text << ": " << place.error().what();
    EXPECT_EQ(place->role, one.role) << one.text;
    EXPECT_EQ(place->rank, one.rank) << one.text;
    EXPECT_EQ(place->size, one.size) << one.text;
    EXPECT_EQ(place->ranks.empty() ? "" : net::to_string(place->ranks[0]), one.first) << one.text;
  }
}

TEST(TfConfig, ASparseClusterTellsServersButNoRanks) {
  const std::string cluster = R"({"sparseCluster":{"worker":{"0":"w:1"},"ps":["p:1","p:2"]},)";
  const auto worker = place_of(cluster + R"("task":{"type":"worker","index":0}})");
  ASSERT_FALSE(worker);
  EXPECT_CONTAINS(worker.error().what(), "nobody knows how many ranks there are");
  const auto server = place_of(cluster + R"("task":{"type":"ps","index":1}})");
  ASSERT_TRUE(server) << server.error().what();
  EXPECT_EQ(server->role, TfPlace::Role::ParameterServer);
  EXPECT_EQ(server->servers, 2);
}

TEST(TfConfig, RefusesTheRest) {
  const std::string task = R"("task":{"type":"worker","index":0})";
  const struct {
    std::string text;
    const char* why;
  } cases[] = {
      {"", "no JSON"},
      {"{", "from character 2"},
      {"[]", "no object"},
      {R"({"cluster":[]})", "cluster: no object"},
      {R"({"cluster":{"worker":"a:1"},)" + task + "}", "neither a list"},
      {R"({"cluster":{"worker":[1]},)" + task + "}", "no text"},
      {R"({"cluster":{"worker":["a"]},)" + task + "}", "there is no port"},
      {R"({"cluster":{"worker":[null,"a:1"]},)" + task + "}", "no text"},
      {R"({"cluster":{"worker":{"x":"a:1"}},)" + task + "}", "'x' is no index"},
      {R"({"cluster":{"worker":{"0":"a:1","00":"b:1"}},)" + task + "}", "second time"},
      {R"({"cluster":{"worker":["a:1"]}})", "no task"},
      {R"({"cluster":{"worker":["a:1"]},"task":[]})", "task: no object"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"index":0}})", "there is no type"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"boss","index":0}})", "'boss'"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"worker"}})", "there is no index"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":-1}})", "no number from 0"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":1.5}})", "no number from 0"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":1e30}})", "no number from 0"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":1}})", "worker 1 is not in the cluster"},
      {R"({"cluster":{"worker":["a:1"]},"task":{"type":"chief","index":0}})", "'chief' is not in the cluster"},
      {R"({"cluster":{"chief":["a:1","b:1"]},"task":{"type":"chief","index":0}})", "more than one chief"},
      {R"({"cluster":{"chief":["a:1"],"master":["b:1"]},"task":{"type":"chief","index":0}})", "same role"},
      {R"({"cluster":{"master":["b:1"]},"task":{"type":"evaluator","index":0}})", "master cannot have"},
      {R"({"cluster":{"worker":["a:1"],"evaluator":["b:1","c:1"]},)" + task + "}", "more than one evaluator"},
      {R"({"task":{"type":"worker","index":2}})", "index is not 0"},
      {R"({"rpc_layer":3})", "rpc_layer"},
      // A worker of a growing cluster knows only itself, and that is no world of one.
      {R"({"cluster":{"worker":{"0":"a:1"},"ps":["p:1"]},)" + task + "}", "only some of the tasks"},
      {R"({"cluster":{"worker":{"1":"a:1"},"ps":["p:1"]},"task":{"type":"worker","index":1}})",
       "only some of the tasks"},
      {R"({"cluster":{"worker":{"0":"a:1","2":"b:1"}},)" + task + "}", "only some of the tasks"},
  };
  for (const auto& one : cases) {
    const auto place = place_of(one.text);
    ASSERT_FALSE(place) << one.text;
    EXPECT_EQ(place.error().code(), ErrorCode::InvalidArgument);
    EXPECT_CONTAINS(place.error().what(), "TF_CONFIG");
    EXPECT_CONTAINS(place.error().what(), one.why);
  }
  EXPECT_FALSE(parse_tf_config(std::string(100000, '[')));
  EXPECT_FALSE(parse_tf_config(std::string(std::size_t{5} << 20, ' ')));
}

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
  EXPECT_EQ(all->hosts, (Names{"algo-1", "algo-10", "algo-2"}));  // the order is that of the list
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

  // The toolkit's variables take precedence; outside of a training job, the file is not read.
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
}  // namespace cohort::rendezvous
