#include "cluster/tf_config.h"

#include <gtest/gtest.h>

namespace cohort::cluster {
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
      // The evaluator may stand outside of the cluster.
      {"{" + workers + R"(,"task":{"type":"evaluator","index":0}})", Role::Evaluator, 0, 1, "h1:1"},
      {R"({"cluster":{"evaluator":["e:1"]},"task":{"type":"evaluator","index":0}})", Role::Evaluator, 0, 1, ""},
      // TensorFlow's old name of the chief.
      {R"({"cluster":{"master":["m:1"],"worker":["w:1"]},"task":{"type":"master","index":0}})", Role::Rank, 0, 2,
       "m:1"},
      {R"({"cluster":{"master":["m:1"],"worker":["w:1"]},"task":{"type":"worker","index":0}})", Role::Rank, 1, 2,
       "m:1"},
      {R"({"cluster":{"chief":["c:1"]},"task":{"type":"chief","index":0}})", Role::Single, 0, 1, "c:1"},
      // By index, complete.
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
      // A worker of a cluster that grows knows only itself: that is no world of one.
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

}  // namespace
}  // namespace cohort::cluster
