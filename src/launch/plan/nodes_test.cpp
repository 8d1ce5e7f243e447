#include "launch/plan/nodes.h"

#include <gtest/gtest.h>

namespace cohort::launch {
namespace {

using Variables = cluster::Environment;

std::string shown(const Result<std::optional<NodeRole>>& role) {
  if (!role) return role.error().what();
  if (!*role) return "alone";
  const NodeRole& node = **role;
  if (node.count == 1) return "only one";
  const std::string where = node.master ? net::to_string(*node.master) : "step";
  return fmt::format("{} of {} at {}", node.rank, node.count, where);
}

std::string by_hand(const std::string& count, const std::string& rank, const std::string& master,
                    const Variables& environment = {}) {
  NodeOptions options;
  options.count = count;
  options.rank = rank;
  options.master = master;
  options.has_secret = environment.empty();
  return shown(choose_node(options, environment));
}

std::string found(const Variables& environment) { return shown(choose_node({}, environment)); }

/// Of srun: the task of a step of so many.
Variables task(int rank, int size, int nodes, const std::string& per_node) {
  return {{"SLURM_JOB_ID", "7"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NODEID", std::to_string(rank * nodes / size)},
          {"SLURM_LOCALID", std::to_string(rank % (size / nodes))},
          {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
          {"SLURM_STEP_NUM_NODES", std::to_string(nodes)},
          {"SLURM_STEP_TASKS_PER_NODE", per_node},
          {"SLURM_STEP_NODELIST", fmt::format("n[1-{}]", nodes)}};
}

Variables with(Variables environment, const Variables& more) {
  environment.insert(more.begin(), more.end());
  return environment;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Nodes, ByHandAsTorchrunHasThem) {
  EXPECT_EQ(by_hand("2", "1", "h1:4712"), "1 of 2 at h1:4712");
  EXPECT_EQ(by_hand("2", "0", "h1"), "0 of 2 at h1:29500");
  EXPECT_EQ(by_hand("2", "0", "[fd77::1]:80"), "0 of 2 at [fd77::1]:80");
  EXPECT_EQ(by_hand("1", "0", ""), "only one");
  EXPECT_EQ(by_hand("1", "", ""), "only one");
  EXPECT_EQ(by_hand("2:2", "1", "h1"), "1 of 2 at h1:29500");
  NodeOptions torch;
  torch.count = "2";
  torch.rank = "1";
  torch.master_addr = "fd77::1";
  EXPECT_EQ(shown(choose_node(torch, {})), "1 of 2 at [fd77::1]:29500");
  torch.master_port = "4712";
  EXPECT_EQ(shown(choose_node(torch, {})), "1 of 2 at [fd77::1]:4712");
  torch.master = "h1";
  EXPECT_TRUE(has(shown(choose_node(torch, {})), "give one")) << shown(choose_node(torch, {}));
}

TEST(Nodes, TorchrunsRendezvousIsAPlaceWhereNobodyNeedsANumber) {
  NodeOptions options;
  options.count = "2";
  options.endpoint = "h1:4712";
  options.id = "77";
  const auto said = [&](const Variables& environment = {}) { return shown(choose_node(options, environment)); };
  EXPECT_EQ(said(), "-1 of 2 at h1:4712");
  EXPECT_EQ(value_or_throw(choose_node(options, {}))->id, "77");
  for (const char* backend : {"c10d", "static"}) {
    options.backend = backend;
    EXPECT_EQ(said(), "-1 of 2 at h1:4712");
  }
  options.endpoint = "h1";
  EXPECT_EQ(said(), "-1 of 2 at h1:29500");
  options.backend = "c10d";
  EXPECT_EQ(said(), "-1 of 2 at h1:29400");
  options.rank = "1";
  EXPECT_EQ(said(), "1 of 2 at h1:29400");
  options.master = "h1";
  EXPECT_TRUE(has(said(), "--master h1 and --rdzv-endpoint h1: both say")) << said();
  options.master = options.rank = "";
  for (const char* server : {"etcd", "etcd-v2", "mine"}) {
    options.backend = server;
    EXPECT_TRUE(has(said(), fmt::format("--rdzv-backend {}: ", server)) && has(said(), "or c10d")) << said();
  }
  options.backend = "";
  options.endpoint = "localhost:0";
  EXPECT_TRUE(has(said(), "--rdzv-endpoint localhost:0: HOST or HOST:PORT")) << said();
  for (const char* one : {"1", "1:1"}) {
    options.count = one;
    EXPECT_EQ(said(), "only one");
  }
  options.count = "";
  EXPECT_EQ(said(), "alone");  // torchrun's own default
  options.endpoint = "h1:4712";
  EXPECT_TRUE(has(said(), "--rdzv-endpoint h1:4712: --nnodes is wanted, too")) << said();
  options.standalone = true;
  EXPECT_EQ(said(task(0, 2, 2, "1(x2)")), "only one");
  options.count = "2";
  EXPECT_TRUE(has(said(), "--standalone and --nnodes 2: ")) << said();
}

TEST(Nodes, TorchrunsVariablesStandForItsOptions) {
  const Variables all = {{"PET_NNODES", "2"}, {"PET_RDZV_ENDPOINT", "h1:4712"}, {"PET_RDZV_ID", "77"}};
  EXPECT_EQ(found(all), "-1 of 2 at h1:4712");
  EXPECT_EQ(found(with(all, {{"PET_NODE_RANK", "1"}})), "1 of 2 at h1:4712");
  EXPECT_EQ(found(with(all, {{"PET_STANDALONE", "1"}, {"PET_NNODES", "1"}})).substr(0, 14), "PET_STANDALONE");
  EXPECT_EQ(found({{"PET_STANDALONE", "1"}}), "only one");
  EXPECT_EQ(found({{"PET_NNODES", "1"}}), "only one");
  EXPECT_EQ(found(with(all, {{"LOCAL_RANK", "0"}})), "alone");  // they were for torchrun, which has started this
  EXPECT_EQ(found(with(all, {{"COHORT_ALONE", "1"}})), "alone");
  // What was typed counts before them, and they fill what was not.
  EXPECT_EQ(by_hand("3", "", "", with(all, {{"PET_NODE_RANK", "2"}})), "2 of 3 at h1:4712");
  EXPECT_EQ(by_hand("", "1", "h2", all), "1 of 2 at h2:29500");
  const auto refuses = [](const std::string& said, const std::string& why) { EXPECT_TRUE(has(said, why)) << said; };
  refuses(found({{"PET_NNODES", "2"}}), "PET_NNODES=2: --node-rank is wanted, too");
  refuses(found({{"PET_NNODES", "1:4"}, {"PET_RDZV_ENDPOINT", "h1"}}), "PET_NNODES=1:4: a job has as many nodes");
  refuses(found(with(all, {{"PET_RDZV_BACKEND", "etcd"}})), "PET_RDZV_BACKEND=etcd: ");
}

TEST(Nodes, WhatHasNoMeaningIsRefused) {
  const auto refuses = [](const std::string& said, const std::string& why) { EXPECT_TRUE(has(said, why)) << said; };
  refuses(by_hand("1:4", "0", "h1"), "--nnodes 1:4: a job has as many nodes");
  refuses(by_hand("1:x", "0", "h1"), "--nnodes x: a number from 1");
  refuses(by_hand("0", "0", "h1"), "--nnodes 0: a number from 1");
  refuses(by_hand("two", "0", "h1"), "--nnodes two: a number from 1");
  refuses(by_hand("2", "2", "h1"), "--node-rank 2: a number from 0 to 1");
  refuses(by_hand("2", "", "h1"), "--node-rank is wanted, too: 0 on the host of --master, and 1 on the other");
  refuses(by_hand("2", "0", ""), "--master HOST:PORT is wanted, too");
  for (const char* bad : {"h1:0", "h1:x", "a b", "h1:70000", "::1"})
    refuses(by_hand("2", "0", bad), "--master " + std::string(bad) + ": HOST or HOST:PORT");
  refuses(by_hand("", "1", ""), "--node-rank 1: --nnodes is wanted, too");
  refuses(by_hand("", "", "h1"), "--master h1: --nnodes is wanted, too");
  NodeOptions options;
  options.count = "2";
  options.rank = "0";
  options.master = "h1";
  options.has_hosts = true;
  refuses(shown(choose_node(options, {})), "leave out -H, --hostfile and --nodes");
}

TEST(Nodes, ATaskOnEachNodeOfAStepIsALauncherOfOneJob) {
  EXPECT_EQ(found(task(0, 2, 2, "1(x2)")), "0 of 2 at step");
  EXPECT_EQ(found(task(2, 3, 3, "1(x3)")), "2 of 3 at step");
  EXPECT_EQ(found(task(0, 1, 1, "1")), "alone");
  // Scripts repeat it for torch.
  EXPECT_EQ(found(with(task(1, 2, 2, "1(x2)"), {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n1"}})),
            "1 of 2 at step");
  EXPECT_EQ(found(with(task(1, 2, 2, "1(x2)"), {{"WORLD_SIZE", "8"}, {"MASTER_ADDR", "n1"}})), "1 of 2 at step");
  // The batch script, which is no task.
  auto script = task(0, 2, 2, "1(x2)");
  script["SLURM_STEP_ID"] = "4294967291";
  EXPECT_EQ(found(script), "alone");
}

TEST(Nodes, ByHandInAStepTheSecretComesByIt) {
  EXPECT_EQ(by_hand("2", "1", "n1:4712", task(1, 2, 2, "1(x2)")), "1 of 2 at step");
  EXPECT_EQ(by_hand("2", "1", "", task(1, 2, 2, "1(x2)")), "1 of 2 at step");
  EXPECT_EQ(by_hand("2", "", "n1:4712", task(1, 2, 2, "1(x2)")), "1 of 2 at step");
  EXPECT_TRUE(has(by_hand("3", "", "n1:4712", task(1, 2, 2, "1(x2)")), "--node-rank is wanted, too"));
  // What Slurm says is another job: the options count.
  EXPECT_EQ(by_hand("3", "1", "n1:4712", task(1, 2, 2, "1(x2)")), "1 of 3 at n1:4712");
  EXPECT_EQ(by_hand("2", "0", "n1:4712", task(1, 2, 2, "1(x2)")), "0 of 2 at n1:4712");
  NodeOptions secret;
  secret.count = "2";
  secret.rank = "1";
  secret.master = "n1";
  secret.has_secret = true;
  EXPECT_EQ(shown(choose_node(secret, task(1, 2, 2, "1(x2)"))), "1 of 2 at n1:29500");
}

TEST(Nodes, SeveralThatCannotBeOneJobAreRefusedWithTheCommandToUse) {
  const std::pair<Variables, std::string> cases[] = {
      {task(1, 4, 2, "2(x2)"), "`srun --ntasks-per-node=1 cohort run -np N PROGRAM`"},
      {task(1, 2, 1, "2"), "`srun -n 2 PROGRAM`"},
      {{{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "1"}}, "`mpirun -np 4 PROGRAM`"},
      {{{"PMI_SIZE", "4"}, {"PMI_RANK", "1"}}, "`mpirun -np 4 PROGRAM`"},
      {{{"HOROVOD_SIZE", "4"}, {"HOROVOD_RANK", "1"}}, "`horovodrun -np 4 PROGRAM`"},
      {{{"JSM_NAMESPACE_SIZE", "4"}, {"JSM_NAMESPACE_RANK", "1"}}, "`jsrun -n 4 PROGRAM`"},
      {{{"TORCHELASTIC_RUN_ID", "x"}, {"WORLD_SIZE", "4"}, {"RANK", "1"}}, "`torchrun ... PROGRAM`"},
      {{{"COHORT_STORE", "h:1"}, {"WORLD_SIZE", "4"}, {"RANK", "1"}}, "leave the inner one out"},
      {{{"MASTER_ADDR", "h"}, {"WORLD_SIZE", "4"}, {"RANK", "1"}}, "--nnodes 4 --node-rank 1 --master HOST:PORT"},
  };
  for (const auto& [environment, command] : cases) {
    const std::string said = found(environment);
    EXPECT_TRUE(has(said, command)) << said;
    EXPECT_TRUE(has(said, "each would be a job of its own")) << said;
    EXPECT_TRUE(has(said, "COHORT_ALONE=1")) << said;
    EXPECT_EQ(found(with(environment, {{"COHORT_ALONE", "1"}})), "alone");
  }
  EXPECT_TRUE(has(found({{"PMIX_NAMESPACE", "prterun-a@1"}, {"PMIX_RANK", "1"}}), "`prterun -np N PROGRAM`"));
  EXPECT_EQ(found({{"PMIX_NAMESPACE", "prterun-a@1"}, {"PMIX_RANK", "0"}}), "alone");  // it cannot know
  NodeOptions hosts;
  hosts.has_hosts = true;  // each launcher would start its own job on all of them
  EXPECT_TRUE(has(shown(choose_node(hosts, task(0, 2, 2, "1(x2)"))), "each would be a job of its own"));
}

TEST(Nodes, OneOfOneAndWhatSaysNoNumberIsAlone) {
  EXPECT_EQ(found({}), "alone");
  EXPECT_EQ(found({{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}), "alone");
  EXPECT_EQ(found({{"WORLD_SIZE", "4"}}), "alone");  // exported for the ranks, and no rank
  EXPECT_EQ(found({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}), "alone");
}

TEST(Nodes, PodsThatNameTheFirstAreLaunchersOfOneJob) {
  EXPECT_EQ(found({{"SM_CURRENT_HOST", "algo-2"}, {"SM_HOSTS", R"(["algo-1","algo-2"])"}}), "1 of 2 at algo-1:29500");
  const Variables pod = {
      {"PET_NNODES", "2"}, {"PET_NODE_RANK", "1"}, {"PET_MASTER_ADDR", "job-0"}, {"PET_MASTER_PORT", "1234"}};
  EXPECT_EQ(found(pod), "1 of 2 at job-0:1234");
  EXPECT_EQ(found(with(pod, {{"PET_NPROC_PER_NODE", "4"}})), "1 of 2 at job-0:1234");
  EXPECT_EQ(found(with(pod, {{"PET_NPROC_PER_NODE", "4"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}})),
            "1 of 2 at job-0:1234");
  EXPECT_EQ(found({{"TF_CONFIG", R"({"cluster":{"worker":["a:1","b:2"]},"task":{"type":"worker","index":1}})"}}),
            "1 of 2 at a:1");
}

}  // namespace
}  // namespace cohort::launch
