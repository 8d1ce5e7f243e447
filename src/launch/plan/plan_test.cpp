#include "launch/plan/plan.h"

#include <cohort/cluster_spec.h>

#include "base/env.h"
#include "cluster/json_variables.h"
#include "launch/plan/port_lease.h"
#include "launch/plan/rank_environment.h"

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
  const auto plan = make_plan({{"a", 2}, {"b", 4}, {"c", 1}}, 5);
  ASSERT_TRUE(plan);
  ASSERT_EQ(plan->hosts.size(), 2U);
  EXPECT_EQ(plan->hosts[1].first_rank, 2);
  EXPECT_EQ(plan->hosts[1].ranks, 3);
  EXPECT_EQ(to_string(*plan), "5 processes on 2 hosts (a: ranks 0-1, b: ranks 2-4)");
  EXPECT_EQ(to_string(*make_plan({{"a", 2}}, 1)), "1 process on 1 host (a: rank 0)");
}

TEST(PlanTest, RefusesWhatHasNoMeaning) {
  EXPECT_FALSE(make_plan({{"a", 2}}, 0));
  EXPECT_FALSE(make_plan({{"a", 2}}, 3));
  EXPECT_FALSE(make_plan({{"a", 0}}, 1));
  EXPECT_FALSE(make_plan({{"a", 2}, {"a", 2}}, 1));
  EXPECT_FALSE(make_plan({{"a", 1 << 20}}, 1 << 17));
}

TEST(PlanTest, RanksKnowTheirPlaceOnSeveralHosts) {
  const auto plan = *make_plan({{"a", 2}, {"b", 2}}, 4);
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
  const auto plan =
      make_plan({{"a", 1, false, "a", {"0", "1"}}, {"a", 2, false, "a", {"3", "1"}}, {"b", 1, false, "b"}}, 4);
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
  const auto plan = *make_plan({{"a", 2}, {"b", 2}, {"c", 2}}, 5, {.servers = 4, .evaluator = true});
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
  EXPECT_EQ(make_plan({{"a", 1}, {"b", 1}}, 2, {.servers = 1})->hosts[1].servers, 0);
  // A host that runs no rank runs no server either.
  const auto each = *make_plan({{"a", 2}, {"b", 2}, {"c", 2}}, 3, {.colocated = true});
  EXPECT_EQ(each.servers, 2);
  EXPECT_EQ(each.hosts[1].first_server, 1);
  EXPECT_FALSE(make_plan({{"a", 2}}, 2, {.servers = -1}));
  EXPECT_FALSE(make_plan({{"a", 2}}, 2, {.servers = kMostProcesses}));
}

TEST(PlanTest, ServersFillTheHostsThatAreNamedForThem) {
  const auto plan = *make_plan({{"a", 2}, {"b", 2}}, 3, {.server_hosts = {{"c", 2, false}, {"b", 1}}});
  EXPECT_EQ(to_string(plan),
            "3 processes and 3 servers on 3 hosts (a: ranks 0-1, b: rank 2, server 2, c: servers 0-1)");
  EXPECT_EQ(plan.machines, 2);  // GROUP_WORLD_SIZE
  EXPECT_EQ(plan.hosts[2].ranks, 0);
  EXPECT_FALSE(plan.hosts[2].local);
  EXPECT_EQ(processes_of(plan, plan.hosts[2]), (std::vector{3, 4}));
  EXPECT_EQ(hosts_of_processes(plan), (std::vector<std::string>{"a", "a", "b", "c", "c", "b"}));
  // Fewer than they take: the first ones have them, and the others are not there.
  const auto fewer = *make_plan({{"a", 1}}, 1, {.servers = 1, .server_hosts = {{"c", 2}, {"d", 1}}});
  EXPECT_EQ(to_string(fewer), "1 process and 1 server on 2 hosts (a: rank 0, c: server 0)");
  EXPECT_NE(std::string(make_plan({{"a", 1}}, 1, {.servers = 4, .server_hosts = {{"c", 3}}}).error().what())
                .find("4 servers do not fit the 3 slots of --server-hosts"),
            std::string::npos);
  EXPECT_FALSE(make_plan({{"a", 1}}, 1, {.server_hosts = {{"c", 1}, {"c", 1}}}));
}

TEST(PlanTest, AServerIsToldItsRoleAndNothingOfARank) {
  const auto plan = *make_plan({{"a", 1}, {"b", 1}}, 2, {.servers = 2});
  JobFacts facts;
  facts.job_id = "job";
  facts.store = "a:7";
  const auto env = other_environment(plan, plan.hosts[1], 3, facts);
  for (const char* wanted : {"COHORT_ROLE=server", "COHORT_ROLE_NUMBER=1", "COHORT_WORKERS=2", "COHORT_SERVERS=2",
                             "COHORT_HOST=b", "COHORT_STORE=a:7", "COHORT_JOB_ID=job"}) {
    EXPECT_NE(std::find(env.begin(), env.end(), wanted), env.end()) << wanted;
  }
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
  const Plan plan = *make_plan({{"a", 1}}, 1);
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
  const Plan plan = *make_plan({{"a", 2}, {"b", 1}}, 3);
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
  const auto last = cluster::parse_tf_config(value_of(plan.hosts[1], 2));
  ASSERT_TRUE(last) << last.error().what();
  const auto place = cluster::tf_place(*last);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 2);
  EXPECT_EQ(place->size, 3);
  EXPECT_EQ(net::to_string(place->ranks[1]), "10.0.0.1:10002");
  EXPECT_EQ(net::to_string(place->ranks[2]), "[fd00::2]:10001");
  EXPECT_EQ(cluster::parse_tf_config(value_of(plan.hosts[0], 1))->task_index, 1);
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
    const auto config = cluster::parse_tf_config(text);
    ASSERT_TRUE(config);
    EXPECT_EQ(config->task_type, tasks[process].first);
    EXPECT_EQ(config->task_index, tasks[process].second);
    // Who reads it has the same number as in the job.
    const auto place = cluster::tf_place(*config);
    ASSERT_TRUE(place);
    EXPECT_EQ(place->rank, roles.is_rank(process) ? process : 0);
    EXPECT_EQ(place->servers, 2);
  }
}

TEST(RankEnvironmentTest, HorovodsNumbersOfHostsThatDiffer) {
  const Plan plan = *make_plan({{"a", 1}, {"b", 3}, {"c", 2}}, 6);
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

}  // namespace
}  // namespace cohort::launch
