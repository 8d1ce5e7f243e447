#include <cohort/cluster_spec.h>

#include "base/env.h"
#include "launch/plan/plan.h"
#include "launch/plan/rank_environment.h"
#include "rendezvous/json_variables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

TEST(PlanTest, FillsHostsInOrder) {
  const auto plan = make_plan({.hosts = {{"a", 2}, {"b", 4}, {"c", 1}}}, 5);
  ASSERT_TRUE(plan);
  ASSERT_EQ(plan->hosts.size(), 2U);
  EXPECT_EQ(plan->hosts[1].first_rank, 2);
  EXPECT_EQ(plan->hosts[1].ranks, 3);
  EXPECT_EQ(to_string(*plan), "5 processes on 2 hosts (a: ranks 0-1, b: ranks 2-4)");
  EXPECT_EQ(to_string(*make_plan({.hosts = {{"a", 2}}}, 1)), "1 process on 1 host (a: rank 0)");
}

TEST(PlanTest, RefusesWhatHasNoMeaning) {
  EXPECT_FALSE(make_plan({.hosts = {{"a", 2}}}, 0));
  EXPECT_FALSE(make_plan({.hosts = {{"a", 2}}}, 3));
  EXPECT_FALSE(make_plan({.hosts = {{"a", 0}}}, 1));
  EXPECT_FALSE(make_plan({.hosts = {{"a", 2}, {"a", 2}}}, 1));
  EXPECT_FALSE(make_plan({.hosts = {{"a", 1 << 20}}}, 1 << 17));
}

TEST(PlanTest, SharesOfHostsAreThoseOfTheirRanks) {
  const auto plan = *make_plan({.hosts = {{"a", 2}, {"b", 3}}}, 5);
  EXPECT_EQ(shares_by_rank(plan, "measured"), "measured");
  EXPECT_EQ(shares_by_rank(plan, "2,1"), "6,6,2,2,2");  // each rank of a gets as much as all of b
  EXPECT_EQ(shares_by_rank(plan, "1,2,3,4,5"), "1,2,3,4,5");
  for (const char* wrong : {"", "2", "2,1,1", "2,x", "-1,2", "0,0", "1,2,", "fast"})
    EXPECT_FALSE(shares_by_rank(plan, wrong)) << wrong;
  Plan elastic = plan;
  elastic.least = 2;
  EXPECT_TRUE(shares_by_rank(elastic, "measured"));
  const auto refused = shares_by_rank(elastic, "2,1");
  ASSERT_FALSE(refused);
  EXPECT_NE(std::string(refused.error().what()).find("--shares measured"), std::string::npos);
}

TEST(PlanTest, RanksKnowTheirPlaceOnSeveralHosts) {
  const auto plan = *make_plan({.hosts = {{"a", 2}, {"b", 2}}}, 4);
  JobFacts facts;
  facts.master_address = "a";
  facts.master_port = 1234;
  const auto env = rank_environment(plan, plan.hosts[1], 3, facts);
  for (const char* wanted : {"RANK=3", "LOCAL_RANK=1", "GROUP_RANK=1", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2",
                             "GROUP_WORLD_SIZE=2", "MASTER_ADDR=a", "MASTER_PORT=1234", "COHORT_HOST=b"}) {
    EXPECT_NE(std::find(env.begin(), env.end(), wanted), env.end()) << wanted;
  }
  EXPECT_TRUE(
      std::none_of(env.begin(), env.end(), [](const auto& word) { return word.starts_with("COHORT_HOST_TIMEOUT"); }));
  facts.host_timeout = std::chrono::seconds(9);
  const auto patient = rank_environment(plan, plan.hosts[1], 3, facts);
  EXPECT_NE(std::find(patient.begin(), patient.end(), "COHORT_HOST_TIMEOUT=9"), patient.end());
  for (const char* wanted : {"KERAS_DISTRIBUTION_JOB_ADDRESSES=a:1234", "KERAS_DISTRIBUTION_NUM_PROCESSES=4",
                             "KERAS_DISTRIBUTION_PROCESS_ID=3"}) {
    EXPECT_NE(std::find(env.begin(), env.end(), wanted), env.end()) << wanted;
  }
}

TEST(PlanTest, PartsOfAHostCountTheirRanksTogether) {
  const auto plan = make_plan(
      {.hosts = {{"a", 1, false, "a", {"0", "1"}}, {"a", 2, false, "a", {"3", "1"}}, {"b", 1, false, "b"}}}, 4);
  ASSERT_TRUE(plan);
  EXPECT_EQ(to_string(*plan), "4 processes on 2 hosts (a: ranks 0-2, b: rank 3)");
  const auto has = [&plan](std::size_t host, int rank, std::initializer_list<const char*> wanted) {
    auto env = rank_environment(*plan, plan->hosts[host], rank, {});
    for (std::string& word : horovod_environment(*plan, plan->hosts[host], rank)) env.push_back(std::move(word));
    for (const char* word : wanted) EXPECT_NE(std::find(env.begin(), env.end(), word), env.end()) << word;
  };
  has(0, 0, {"LOCAL_RANK=0", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=0", "GROUP_WORLD_SIZE=2", "CUDA_VISIBLE_DEVICES=0,1,3"});
  has(1, 2, {"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=0", "HOROVOD_CROSS_SIZE=1", "HOROVOD_LOCAL_RANK=2"});
  has(2, 3, {"LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "GROUP_RANK=1", "HOROVOD_CROSS_RANK=1", "HOROVOD_CROSS_SIZE=2"});
}

TEST(PlanTest, ServersAreSpreadOverTheHostsAndAreNoRanks) {
  const auto plan =
      *make_plan({.hosts = {{"a", 2}, {"b", 2}, {"c", 2}}}, 5, {.servers = 4, .evaluator = ProgramRequest()});
  EXPECT_EQ(plan.world_size, 5);
  EXPECT_EQ(to_string(plan),
            "5 processes, 4 servers and an evaluator on 3 hosts (a: ranks 0-1, servers 0-1, evaluator, b: ranks 2-3, "
            "server 2, c: rank 4, server 3)");
  EXPECT_EQ(processes_of(plan, plan.hosts[0]), (std::vector<int>{0, 1, 5, 6, 9}));
  EXPECT_EQ(processes_of(plan, plan.hosts[2]), (std::vector<int>{4, 8}));
  EXPECT_EQ(hosts_of_processes(plan)[8], "c");
  const Roles roles = plan.roles();
  EXPECT_EQ(roles.name_of(8), "server 3");
  EXPECT_EQ(roles.process_of(Role::Server, 3), 8);
  EXPECT_EQ(roles.names_of({3, 4, 5, 6, 9}), "ranks 3-4, servers 0-1, evaluator");
  EXPECT_EQ(file_name(Role::Server, 3), "server-3");
  // Fewer servers than hosts: the first hosts have them.
  EXPECT_EQ(make_plan({.hosts = {{"a", 1}, {"b", 1}}}, 2, {.servers = 1})->hosts[1].servers, 0);
  // A host that runs no rank runs no server either.
  const auto each = *make_plan({.hosts = {{"a", 2}, {"b", 2}, {"c", 2}}}, 3, {.colocated = true});
  EXPECT_EQ(each.servers, 2);
  EXPECT_EQ(each.hosts[1].first_server, 1);
  EXPECT_FALSE(make_plan({.hosts = {{"a", 2}}}, 2, {.servers = -1}));
  EXPECT_FALSE(make_plan({.hosts = {{"a", 2}}}, 2, {.servers = kMostProcesses}));
}

TEST(PlanTest, ServersFillTheHostsThatAreNamedForThem) {
  const auto plan = *make_plan({.hosts = {{"a", 2}, {"b", 2}}, .server_hosts = {{"c", 2, false}, {"b", 1}}}, 3);
  EXPECT_EQ(to_string(plan),
            "3 processes and 3 servers on 3 hosts (a: ranks 0-1, b: rank 2, server 2, c: servers 0-1)");
  EXPECT_EQ(plan.machines, 2);  // GROUP_WORLD_SIZE
  EXPECT_EQ(plan.hosts[2].ranks, 0);
  EXPECT_FALSE(plan.hosts[2].local);
  EXPECT_EQ(processes_of(plan, plan.hosts[2]), (std::vector{3, 4}));
  EXPECT_EQ(hosts_of_processes(plan), (std::vector<std::string>{"a", "a", "b", "c", "c", "b"}));
  // If there are fewer servers than the hosts take, the first hosts have them, and the others are left out.
  const auto fewer = *make_plan({.hosts = {{"a", 1}}, .server_hosts = {{"c", 2}, {"d", 1}}}, 1, {.servers = 1});
  EXPECT_EQ(to_string(fewer), "1 process and 1 server on 2 hosts (a: rank 0, c: server 0)");
  EXPECT_NE(std::string(make_plan({.hosts = {{"a", 1}}, .server_hosts = {{"c", 3}}}, 1, {.servers = 4}).error().what())
                .find("4 servers do not fit the 3 slots of --server-hosts"),
            std::string::npos);
  EXPECT_FALSE(make_plan({.hosts = {{"a", 1}}, .server_hosts = {{"c", 1}, {"c", 1}}}, 1));
}

TEST(PlanTest, AServerIsToldItsRoleAndNothingOfARank) {
  const auto plan = *make_plan({.hosts = {{"a", 1}, {"b", 1}}}, 2, {.servers = 2});
  JobFacts facts;
  facts.job_id = "job";
  facts.store = "a:7";
  const auto env = other_environment(plan, plan.hosts[1], 3, facts);
  for (const char* wanted : {"COHORT_ROLE=server", "COHORT_ROLE_NUMBER=1", "COHORT_WORKERS=2", "COHORT_SERVERS=2",
                             "COHORT_HOST=b", "COHORT_STORE=a:7", "COHORT_JOB_ID=job"}) {
    EXPECT_NE(std::find(env.begin(), env.end(), wanted), env.end()) << wanted;
  }
  EXPECT_FALSE(Environment(env).find("COHORT_SERVER_RESTART"));
  facts.servers_may_die = true;
  EXPECT_EQ(Environment(other_environment(plan, plan.hosts[1], 3, facts)).find("COHORT_SERVER_RESTART"), "0");
  Environment inherited(rank_environment(plan, plan.hosts[1], 1, facts));
  inherited.set("HOROVOD_RANK", "1");
  inherited.set("MINE", "1");
  remove_rank_variables(inherited);
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "HOROVOD_RANK"})
    EXPECT_FALSE(inherited.find(name)) << name;
  EXPECT_TRUE(inherited.find("MINE"));
  EXPECT_TRUE(inherited.find("COHORT_STORE"));
}

TEST(RankEnvironmentTest, EveryVariableIsInTheTable) {
  const Plan plan = *make_plan({.hosts = {{"a", 1}}}, 1);
  JobFacts facts;
  facts.tf_addresses = {"a:1"};
  auto all = rank_environment(plan, plan.hosts[0], 0, facts);
  for (std::string& word : horovod_environment(plan, plan.hosts[0], 0)) all.push_back(std::move(word));
  for (std::string& word : other_environment(plan, plan.hosts[0], 1, {})) all.push_back(std::move(word));
  for (const std::string& word : all) {
    const std::string name = word.substr(0, word.find('='));
    EXPECT_TRUE(std::any_of(env::variables().begin(), env::variables().end(), [&name](const env::Variable& variable) {
      return variable.name == name;
    })) << name;
  }
}

TEST(RankEnvironmentTest, TensorFlowsClusterHasEveryRankAsAWorker) {
  const Plan plan = *make_plan({.hosts = {{"a", 2}, {"b", 1}}}, 3);
  JobFacts facts;
  const auto value_of = [&](const PlannedHost& host, int rank) {
    constexpr std::string_view kName = "TF_CONFIG=";
    for (const std::string& word : rank_environment(plan, host, rank, facts)) {
      if (word.starts_with(kName)) return word.substr(kName.size());
    }
    return std::string();
  };
  EXPECT_EQ(value_of(plan.hosts[0], 0), "");
  facts.tf_addresses = {"10.0.0.1:10001", "10.0.0.1:10002", "[fd00::2]:10001"};
  const auto last = rendezvous::parse_tf_config(value_of(plan.hosts[1], 2));
  ASSERT_TRUE(last) << last.error().what();
  const auto place = rendezvous::tf_place(*last);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 2);
  EXPECT_EQ(place->size, 3);
  EXPECT_EQ(net::to_string(place->ranks[1]), "10.0.0.1:10002");
  EXPECT_EQ(net::to_string(place->ranks[2]), "[fd00::2]:10001");
  EXPECT_EQ(rendezvous::parse_tf_config(value_of(plan.hosts[0], 1))->task_index, 1);
}

TEST(RankEnvironmentTest, TensorFlowsClusterWithServersHasAChief) {
  const Roles roles{3, 2, true};
  const std::vector<std::string> addresses = {"a:1", "a:2", "b:1", "a:3", "b:2"};
  const ClusterSpec spec(std::map<std::string, std::vector<std::string>>{
      {"chief", {"a:1"}}, {"worker", {"a:2", "b:1"}}, {"ps", {"a:3", "b:2"}}});
  const std::pair<const char*, int> tasks[] = {{"chief", 0}, {"worker", 0}, {"worker", 1},
                                               {"ps", 0},    {"ps", 1},     {"evaluator", 0}};
  for (int process = 0; process < roles.all(); ++process) {
    const std::string text = tf_config(roles, addresses, process);
    EXPECT_EQ(ClusterSpec::from_tf_config(text), spec) << text;
    const auto config = rendezvous::parse_tf_config(text);
    ASSERT_TRUE(config);
    EXPECT_EQ(config->task_type, tasks[process].first);
    EXPECT_EQ(config->task_index, tasks[process].second);
    // The rank reads the same number from TF_CONFIG as it has in the job.
    const auto place = rendezvous::tf_place(*config);
    ASSERT_TRUE(place);
    EXPECT_EQ(place->rank, roles.is_rank(process) ? process : 0);
    EXPECT_EQ(place->servers, 2);
  }
}

TEST(RankEnvironmentTest, HorovodsNumbersOfHostsThatDiffer) {
  const Plan plan = *make_plan({.hosts = {{"a", 1}, {"b", 3}, {"c", 2}}}, 6);
  const auto has = [](const std::vector<std::string>& env, const char* wanted) {
    return std::find(env.begin(), env.end(), wanted) != env.end();
  };
  const auto b = horovod_environment(plan, plan.hosts[1], 2);
  for (const char* wanted : {"HOROVOD_RANK=2", "HOROVOD_SIZE=6", "HOROVOD_LOCAL_RANK=1", "HOROVOD_LOCAL_SIZE=3",
                             "HOROVOD_CROSS_RANK=0", "HOROVOD_CROSS_SIZE=2", "HOROVOD_HOSTNAME=b"}) {
    EXPECT_TRUE(has(b, wanted)) << wanted;
  }
  const auto c = horovod_environment(plan, plan.hosts[2], 4);
  EXPECT_TRUE(has(c, "HOROVOD_CROSS_RANK=2"));
  EXPECT_TRUE(has(c, "HOROVOD_CROSS_SIZE=3"));
}

TEST(PortLeaseTest, UsablePortsAvoidEphemeralAndReservedOnes) {
  EXPECT_EQ(usable_ports("32768\t60999\n", "\n"), (std::vector<PortRange>{{10000, 32767}, {61000, 65535}}));
  EXPECT_EQ(usable_ports("10000 65000", "65001,65100-65200"), (std::vector<PortRange>{{65002, 65099}, {65201, 65535}}));
  EXPECT_TRUE(usable_ports("1024 65535", "").empty());
  EXPECT_FALSE(usable_ports("nonsense", "x,-,7-").empty());
}

TEST(PortLeaseTest, HoldersDoNotMeetAndGiveBack) {
  auto first = PortLease::take(5);
  ASSERT_TRUE(first) << first.error().what();
  const auto port = first->port();
  auto second = PortLease::take(5);
  ASSERT_TRUE(second);
  EXPECT_NE(second->port(), port);
}

using Variables = rendezvous::Environment;

std::string shown(const Result<std::optional<NodeRole>>& role) {
  if (!role) return role.error().what();
  if (!*role) return "alone";
  const NodeRole& node = **role;
  if (node.count == 1) return "only one";
  const std::string where = node.master ? net::to_string(*node.master) : "step";
  return fmt::format("{} of {} at {}", node.rank, node.count, where);
}

/// `master`: HOST or HOST:PORT.
std::string by_hand(const std::string& count, const std::string& rank, const std::string& master,
                    const Variables& environment = {}, const std::string& port = {}) {
  JobSpec options;
  options.nnodes = count;
  options.node_rank = rank;
  options.master_addr = master;
  options.master_port = port;
  if (environment.empty()) options.secret_file = "s";
  return shown(choose_node(options, environment));
}

std::string found(const Variables& environment) { return shown(choose_node({}, environment)); }

/// Environment of srun: the task `rank` of a step of `size`.
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
  EXPECT_EQ(by_hand("2", "1", "[fd77::1]:80"), "1 of 2 at [fd77::1]:80");
  EXPECT_EQ(by_hand("2", "1", "h1", {}, "4712"), "1 of 2 at h1:4712");
  EXPECT_EQ(by_hand("2", "0", "h1"), "0 of 2 at h1:29500");
  EXPECT_EQ(by_hand("1", "0", ""), "only one");
  EXPECT_EQ(by_hand("1", "", ""), "only one");
  EXPECT_EQ(by_hand("2:2", "1", "h1"), "1 of 2 at h1:29500");
  JobSpec torch;
  torch.nnodes = "2";
  torch.node_rank = "1";
  torch.master_addr = "fd77::1";
  EXPECT_EQ(shown(choose_node(torch, {})), "1 of 2 at [fd77::1]:29500");
  torch.master_port = "4712";
  EXPECT_EQ(shown(choose_node(torch, {})), "1 of 2 at [fd77::1]:4712");
  torch.master_addr = "[fd77::1]";
  EXPECT_EQ(shown(choose_node(torch, {})), "1 of 2 at [fd77::1]:4712");
}

TEST(Nodes, TorchrunsRendezvousIsAPlaceWhereNobodyNeedsANumber) {
  JobSpec options;
  options.nnodes = "2";
  options.rdzv_endpoint = "h1:4712";
  options.rdzv_id = "77";
  const auto said = [&](const Variables& environment = {}) { return shown(choose_node(options, environment)); };
  EXPECT_EQ(said(), "-1 of 2 at h1:4712");
  EXPECT_EQ(value_or_throw(choose_node(options, {}))->id, "77");
  for (const char* backend : {"c10d", "static"}) {
    options.rdzv_backend = backend;
    EXPECT_EQ(said(), "-1 of 2 at h1:4712");
  }
  options.rdzv_endpoint = "h1";
  EXPECT_EQ(said(), "-1 of 2 at h1:29500");
  options.rdzv_backend = "c10d";
  EXPECT_EQ(said(), "-1 of 2 at h1:29400");
  options.node_rank = "1";
  EXPECT_EQ(said(), "1 of 2 at h1:29400");
  options.node_rank = "";
  for (const char* server : {"etcd", "etcd-v2", "mine"}) {
    options.rdzv_backend = server;
    EXPECT_TRUE(has(said(), fmt::format("--rdzv-backend {}: ", server)) && has(said(), "or c10d")) << said();
  }
  options.rdzv_backend = "";
  options.rdzv_endpoint = "localhost:0";
  EXPECT_TRUE(has(said(), "--rdzv-endpoint localhost:0: HOST or HOST:PORT")) << said();
  for (const char* one : {"1", "1:1"}) {
    options.nnodes = one;
    EXPECT_EQ(said(), "only one");
  }
  options.nnodes = "";
  EXPECT_EQ(said(), "alone");  // torchrun's own default
  options.rdzv_endpoint = "h1:4712";
  EXPECT_TRUE(has(said(), "--rdzv-endpoint h1:4712: --nnodes is wanted, too")) << said();
  options.standalone = true;
  EXPECT_EQ(said(task(0, 2, 2, "1(x2)")), "only one");
  options.nnodes = "2";
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
  // Typed options take precedence over the variables, which fill the rest.
  EXPECT_EQ(by_hand("3", "", "", with(all, {{"PET_NODE_RANK", "2"}})), "2 of 3 at h1:4712");
  EXPECT_EQ(by_hand("", "1", "h2", all), "1 of 2 at h2:29500");
  const auto refuses = [](const std::string& said, const std::string& why) { EXPECT_TRUE(has(said, why)) << said; };
  refuses(found({{"PET_NNODES", "2"}}), "PET_NNODES=2: --node-rank is wanted, too");
  EXPECT_EQ(found({{"PET_NNODES", "1:4"}, {"PET_RDZV_ENDPOINT", "h1"}}), "-1 of 4 at h1:29400");
  refuses(found(with(all, {{"PET_RDZV_BACKEND", "etcd"}})), "PET_RDZV_BACKEND=etcd: ");
}

TEST(Nodes, WhatHasNoMeaningIsRefused) {
  const auto refuses = [](const std::string& said, const std::string& why) { EXPECT_TRUE(has(said, why)) << said; };
  refuses(by_hand("4:1", "0", "h1"), "--nnodes 4: a number from 1 to 1 is wanted");
  refuses(by_hand("1:x", "0", "h1"), "--nnodes x: a number from 1");
  refuses(by_hand("0", "0", "h1"), "--nnodes 0: a number from 1");
  refuses(by_hand("two", "0", "h1"), "--nnodes two: a number from 1");
  refuses(by_hand("2", "2", "h1"), "--node-rank 2: a number from 0 to 1");
  refuses(by_hand("2", "", "h1"), "--node-rank is wanted, too: 0 on the host of --master-addr, and 1 on the other");
  refuses(by_hand("2", "0", ""), "--master-addr HOST is wanted, too");
  for (const char* bad : {"h1:0", "h1:x", "a b", "h1:70000"})
    refuses(by_hand("2", "0", bad), "--master-addr " + std::string(bad) + ": HOST or HOST:PORT");
  refuses(by_hand("2", "0", "h1:4712", {}, "5"),
          "--master-addr h1:4712: the host alone is wanted, since --master-port 5");
  refuses(by_hand("2", "0", "h1", {}, "x"), "--master-port x: a number from 1 to 65535");
  refuses(by_hand("", "1", ""), "--node-rank 1: --nnodes is wanted, too");
  refuses(by_hand("", "", "h1"), "--master-addr h1: --nnodes is wanted, too");
  JobSpec options;
  options.nnodes = "2";
  options.node_rank = "0";
  options.master_addr = "h1";
  options.hosts = "a";
  refuses(shown(choose_node(options, {})), "leave out -H, --hostfile and --nodes");
}

TEST(Nodes, ATaskOnEachNodeOfAStepIsALauncherOfOneJob) {
  EXPECT_EQ(found(task(0, 2, 2, "1(x2)")), "0 of 2 at step");
  EXPECT_EQ(found(task(2, 3, 3, "1(x3)")), "2 of 3 at step");
  EXPECT_EQ(found(task(0, 1, 1, "1")), "alone");
  // Scripts repeat Slurm's values in the variables for torch.
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
  // Slurm's variables describe another job: the options count.
  EXPECT_EQ(by_hand("3", "1", "n1:4712", task(1, 2, 2, "1(x2)")), "1 of 3 at n1:4712");
  EXPECT_EQ(by_hand("2", "0", "n1:4712", task(1, 2, 2, "1(x2)")), "0 of 2 at n1:4712");
  JobSpec secret;
  secret.nnodes = "2";
  secret.node_rank = "1";
  secret.master_addr = "n1";
  secret.secret_file = "s";
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
      {{{"MASTER_ADDR", "h"}, {"WORLD_SIZE", "4"}, {"RANK", "1"}}, "--nnodes 4 --node-rank 1 --master-addr HOST"},
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
  JobSpec hosts;
  hosts.hosts = "a";  // each launcher would start its own job on all of them
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
