#include "rendezvous/detect.h"
#include "rendezvous/identity.h"
#include "rendezvous/init_plan.h"
#include "rendezvous/json_variables.h"

#include <cohort/cluster_spec.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace cohort::rendezvous {
namespace {

struct Good {
  Environment environment;
  std::string launcher;
  int rank, size;
  Meeting meeting;
};

TEST(Detect, KnowsItsLaunchers) {
  const Good cases[] = {
      {{}, "", 0, 1, Meeting::None},
      {{{"RANK", "2"}, {"WORLD_SIZE", "4"}}, "env://", 2, 4, Meeting::Master},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "env://", 0, 1, Meeting::Master},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "x"}}, "torchrun", 1, 2, Meeting::Master},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"COHORT_STORE", "127.0.0.1:1"}}, "cohort run", 1, 2, Meeting::JobStore},
      // `cohort run` imitates torchrun. A torchrun inside of `cohort run` is the inner launcher.
      {{{"RANK", "1"},
        {"WORLD_SIZE", "2"},
        {"COHORT_STORE", "127.0.0.1:1"},
        {"COHORT_JOB_ID", "j"},
        {"TORCHELASTIC_RUN_ID", "j"}},
       "cohort run",
       1,
       2,
       Meeting::JobStore},
      {{{"RANK", "1"},
        {"WORLD_SIZE", "2"},
        {"COHORT_STORE", "127.0.0.1:1"},
        {"COHORT_JOB_ID", "j"},
        {"TORCHELASTIC_RUN_ID", "none"}},
       "torchrun",
       1,
       2,
       Meeting::Master},
      // A rank of an elastic job is the only one left, and still knows its GPU.
      {{{"RANK", "0"},
        {"WORLD_SIZE", "1"},
        {"LOCAL_RANK", "3"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"HOROVOD_RANK", "3"},
        {"HOROVOD_SIZE", "4"},
        {"COHORT_STORE", "127.0.0.1:1"},
        {"COHORT_WORKER", "3"}},
       "cohort run",
       0,
       1,
       Meeting::JobStore},
      // The innermost of several: a larger world inside of a smaller one is somebody's intention.
      {{{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_SIZE", "2"}}, "env://", 5, 8, Meeting::Master},
      // Slurm's batch script is not a task.
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}, "", 0, 1, Meeting::None},
  };
  for (const Good& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_TRUE(detected) << detected.error().what();
    EXPECT_EQ(detected->launcher, one.launcher);
    EXPECT_EQ(detected->rank, one.rank);
    EXPECT_EQ(detected->size, one.size);
    EXPECT_EQ(detected->meeting, one.meeting);
  }
}

TEST(Detect, RefusesContradictionsNamingBothSides) {
  const struct {
    Environment environment;
    const char* first;
    const char* second;
  } cases[] = {
      {{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, "RANK=4", "WORLD_SIZE=4"},
      {{{"RANK", "1"}}, "RANK=1", "WORLD_SIZE"},
      {{{"WORLD_SIZE", "2"}}, "WORLD_SIZE", "RANK"},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "4"}}, "RANK='-1'", "number"},
      {{{"RANK", "1x"}, {"WORLD_SIZE", "4"}}, "RANK='1x'", "number"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE='0'", "number"},
      {{{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}},
       "LOCAL_RANK=2",
       "LOCAL_WORLD_SIZE=2"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "5"}}, "LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}}, "LOCAL_RANK=1", "RANK=0"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"PMI_SIZE", "4"}}, "WORLD_SIZE=1", "PMI_SIZE=4"},
      {{{"OMPI_COMM_WORLD_SIZE", "4"}}, "OMPI_COMM_WORLD_SIZE is set", "OMPI_COMM_WORLD_RANK is not"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "3"}}, "SLURM_STEP_NUM_TASKS is set", "SLURM_PROCID is not"},
      {{{"COHORT_ALONE", "maybe"}}, "COHORT_ALONE='maybe'", "1"},
  };
  for (const auto& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_FALSE(detected) << one.first;
    const std::string message = detected.error().what();
    EXPECT_EQ(detected.error().code(), ErrorCode::InvalidArgument);
    EXPECT_NE(message.find(one.first), std::string::npos) << message;
    EXPECT_NE(message.find(one.second), std::string::npos) << message;
  }
}

TEST(Detect, AloneMeansAlone) {
  EXPECT_TRUE(detect({{"COHORT_ALONE", "yes"}, {"RANK", "2"}, {"WORLD_SIZE", "4"}})->alone);
  EXPECT_FALSE(detect({{"COHORT_ALONE", "off"}, {"RANK", "2"}, {"WORLD_SIZE", "4"}})->alone);
  const auto detected = detect({{"COHORT_ALONE", "1"}, {"RANK", "2"}, {"WORLD_SIZE", "4"}, {"PMI_SIZE", "4"}});
  ASSERT_TRUE(detected);
  EXPECT_TRUE(detected->alone);
  EXPECT_EQ(detected->size, 1);
}

TEST(InitMethod, ReadsWhatItShould) {
  const auto tcp = parse_init_method("tcp://[::1]:29500?world_size=4&rank=3");
  ASSERT_TRUE(tcp) << tcp.error().what();
  EXPECT_EQ(tcp->address, (net::Address{"::1", 29500}));
  EXPECT_EQ(tcp->rank, 3);
  EXPECT_EQ(tcp->world_size, 4);
  const auto file = parse_init_method("file:///a/b");
  ASSERT_TRUE(file);
  EXPECT_EQ(file->path, "/a/b");
  EXPECT_FALSE(file->rank);
  EXPECT_TRUE(parse_init_method("env://"));
  const auto name = parse_init_method("unix://a name?rank=0&world_size=2");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->name, "a name");
  EXPECT_EQ(name->world_size, 2);
}

TEST(InitMethod, RefusesTheRest) {
  for (const char* text : {"", "tcp", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "tcp://::1:80",
                           "file://relative", "file:///", "http://host:1", "unix://", "env://x", "tcp://h:1?rank=-1",
                           "tcp://h:1?rank=1&rank=1", "tcp://h:1?size=1", "tcp://h:1?rank"}) {
    const auto parsed = parse_init_method(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().code(), ErrorCode::InvalidArgument);
  }
}

TEST(HostIdentity, IsTheSameEachTime) {
  EXPECT_EQ(host_identity().id, host_identity().id);
  EXPECT_FALSE(host_identity().name.empty());
}

}  // namespace
}  // namespace cohort::rendezvous

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
  const auto config = rendezvous::parse_tf_config(text);
  ASSERT_TRUE(config) << text;
  EXPECT_EQ(config->task_type, "ps");
  EXPECT_FALSE(config->cluster.at("worker").listed);
  EXPECT_TRUE(config->cluster.at("chief").listed);
  // The evaluator is not in the cluster.
  EXPECT_EQ(rendezvous::parse_tf_config(spec.to_tf_config("evaluator", 0))->task_type, "evaluator");
  EXPECT_TRUE(ClusterSpec::from_tf_config("{}").empty());
}

}  // namespace
}  // namespace cohort
