#include "launch/start/hosts.h"

#include "sys/hardware.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace cohort::launch {
namespace {

std::string shown(const Result<HostChoice>& choice) {
  if (!choice) return choice.error().what();
  std::string text(start_method_name(choice->method));
  for (const HostSlots& host : choice->hosts)
    text += " " + host.name + ":" + std::to_string(host.slots) + (host.local ? "*" : "");
  return text;
}

std::string chosen(const HostOptions& wishes, const std::vector<std::string>& environment = {}) {
  return shown(choose_hosts(wishes, Environment(environment)));
}

HostOptions list(const std::string& text) {
  HostOptions wishes;
  wishes.list = text;
  return wishes;
}

TEST(Hosts, AListNamesHostsAndSlots) {
  EXPECT_EQ(chosen(list("a:4,b,[fd77::9]:2")), "ssh a:4 b:1 fd77::9:2");
  EXPECT_EQ(chosen(list("localhost:2,b:3")), "ssh localhost:2* b:3");
  EXPECT_EQ(chosen(list(sys::host_name() + ":2,b")), "ssh " + sys::host_name() + ":2* b:1");
  EXPECT_EQ(chosen({}), "ssh");
}

TEST(Hosts, NodesAndPerNodeCutTheList) {
  HostOptions wishes = list("a:4,b:4,c:4");
  wishes.nodes = 2;
  EXPECT_EQ(chosen(wishes), "ssh a:4 b:4");
  wishes.per_node = 3;
  EXPECT_EQ(chosen(wishes), "ssh a:3 b:3");
  wishes.nodes = 4;
  EXPECT_EQ(chosen(wishes), "--nodes 4: there are only 3 hosts");
  HostOptions here;
  here.per_node = 3;
  EXPECT_EQ(chosen(here), "ssh " + sys::host_name() + ":3*");
  here.nodes = 2;
  EXPECT_NE(chosen(here).find("name them with -H"), std::string::npos);
}

TEST(Hosts, WhatCouldBeAnOptionOrTwoWordsIsNoHost) {
  for (const char* bad : {"-oProxyCommand=x", "a b", "a;b", "$(x)", "a:0", "a:x", "", "a,,b"}) {
    EXPECT_FALSE(choose_hosts(list(bad), Environment()) && *bad != '\0') << bad;
  }
}

TEST(Hosts, ThisHostByTwoNamesHasTheSlotsOfBoth) {
  EXPECT_EQ(chosen(list("localhost:2,b,127.0.0.1:3," + sys::host_name())), "ssh localhost:6* b:1");
  EXPECT_EQ(choose_hosts(list("localhost:2,127.0.0.1:2"), Environment())->note,
            "localhost and 127.0.0.1 are both this host, which has 4 slots");
  EXPECT_EQ(choose_hosts(list("localhost:2,localhost:2"), Environment())->note, "");
  HostOptions wishes = list("localhost:2,127.0.0.1:2,b");
  wishes.per_node = 3;
  EXPECT_EQ(chosen(wishes), "ssh localhost:3* b:3");
}

TEST(Hosts, ThisHostIsKnownByAnyOfItsNames) {
  for (const char* name : {"LOCALHOST", "localhost.", "127.0.0.2", "127.1.2.3", "::1", "a.localhost"})
    EXPECT_TRUE(is_this_host(name)) << name;
  for (const char* name : {"128.0.0.1", "localhost.example.org", "a", "192.0.2.1"})
    EXPECT_FALSE(is_this_host(name)) << name;
  // Whatever /etc/hosts has for a loopback address.
  std::ifstream file("/etc/hosts");
  for (std::string line; std::getline(file, line);) {
    std::string address, name;
    std::istringstream(line) >> address >> name;
    if (address == "127.0.0.1" || address == "127.0.1.1") {
      EXPECT_TRUE(is_this_host(name)) << line;
    }
  }
}

TEST(Hosts, AllAreHereIfThatIsWanted) {
  HostOptions wishes = list("x:1,y:2");
  wishes.starter = HostOptions::Starter::Local;
  EXPECT_EQ(chosen(wishes), "ssh x:1* y:2*");
}

TEST(Hosts, AShortNameAndAFullOneAreTheSameHost) {
  EXPECT_TRUE(same_host("a", "a"));
  EXPECT_TRUE(same_host("a", "a.cluster.example"));
  EXPECT_TRUE(same_host("a.cluster.example", "a"));
  EXPECT_FALSE(same_host("a.one", "a.two"));
  EXPECT_FALSE(same_host("a", "b"));
  EXPECT_FALSE(same_host("10", "10.0.0.1"));
  EXPECT_TRUE(is_this_host("localhost"));
  EXPECT_TRUE(is_this_host(sys::host_name()));
  EXPECT_FALSE(is_this_host("192.0.2.1"));
}

const std::vector<std::string> kAllocation = {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-3]",
                                              "SLURM_TASKS_PER_NODE=2(x2),1"};

TEST(Hosts, AnAllocationIsTakenWholeAndBySrun) {
  EXPECT_EQ(chosen({}, kAllocation), "srun n1:2 n2:2 n3:1");
  EXPECT_EQ(chosen(list("n2:9"), kAllocation), "srun n2:9");
  EXPECT_EQ(chosen(list("n2,elsewhere"), kAllocation), "ssh n2:1 elsewhere:1");
  HostOptions by_ssh;
  by_ssh.starter = HostOptions::Starter::Ssh;
  EXPECT_EQ(chosen(by_ssh, kAllocation), "ssh n1:2 n2:2 n3:1");
  HostOptions by_srun;
  by_srun.starter = HostOptions::Starter::Slurm;
  by_srun.list = "a,b";
  EXPECT_NE(chosen(by_srun).find("this is no Slurm allocation"), std::string::npos);
}

TEST(Hosts, AHeterogeneousJobHasTheNodesOfAllItsComponents) {
  const auto components_of = [](std::vector<std::string> variables) {
    variables.insert(variables.end(), {"SLURM_JOB_ID=7", "SLURM_HET_SIZE=2"});
    const auto choice = choose_hosts({}, Environment(variables));
    EXPECT_TRUE(choice) << choice.error().what();
    return choice ? choice->components : std::map<std::string, int>();
  };
  // Of a batch script, which runs in the first component.
  std::vector<std::string> script = {"SLURM_JOB_NODELIST=n1",
                                     "SLURM_TASKS_PER_NODE=1",
                                     "SLURM_JOB_NODELIST_HET_GROUP_0=n1",
                                     "SLURM_TASKS_PER_NODE_HET_GROUP_0=1",
                                     "SLURM_JOB_NODELIST_HET_GROUP_1=n[2-3]",
                                     "SLURM_TASKS_PER_NODE_HET_GROUP_1=4(x2)"};
  EXPECT_EQ(components_of(script), (std::map<std::string, int>{{"n1", 0}, {"n2", 1}, {"n3", 1}}));
  script.insert(script.end(), {"SLURM_JOB_ID=7", "SLURM_HET_SIZE=2"});
  EXPECT_EQ(chosen({}, script), "srun n1:1 n2:4 n3:4");
  EXPECT_EQ(chosen(list("n3:2,n1:2"), script), "srun n3:2 n1:2");
  // Of salloc's shell, a node in both components.
  const std::vector<std::string> shell = {"SLURM_JOB_NODELIST_HET_GROUP_0=n1", "SLURM_TASKS_PER_NODE_HET_GROUP_0=1",
                                          "SLURM_JOB_NODELIST_HET_GROUP_1=n[1-2]",
                                          "SLURM_TASKS_PER_NODE_HET_GROUP_1=2,1"};
  EXPECT_EQ(components_of(shell), (std::map<std::string, int>{{"n1", 0}, {"n2", 1}}));
  // Of what srun has started.
  EXPECT_EQ(components_of({"SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=1", "SLURM_JOB_NODELIST_PACK_GROUP_0=n1",
                           "SLURM_JOB_NODELIST_PACK_GROUP_1=n2"}),
            (std::map<std::string, int>{{"n1", 0}, {"n2", 1}}));
  EXPECT_NE(
      chosen({}, {"SLURM_JOB_ID=7", "SLURM_HET_SIZE=2", "SLURM_JOB_NODELIST=n1", "SLURM_JOB_NODELIST_HET_GROUP_0=n1"})
          .find("SLURM_HET_SIZE=2, but there is no SLURM_JOB_NODELIST_HET_GROUP_1"),
      std::string::npos);
}

TEST(Hosts, ServersHaveHostsOfTheirOwn) {
  const auto with_servers = [](HostOptions wishes, const std::string& servers,
                               std::vector<std::string> environment = {}) {
    wishes.servers = servers;
    const auto choice = choose_hosts(wishes, Environment(std::move(environment)));
    std::string text = shown(choice);
    if (choice) {
      text += " |";
      for (const HostSlots& host : choice->server_hosts)
        text += " " + host.name + ":" + std::to_string(host.slots) + (host.local ? "*" : "");
    }
    return text;
  };
  EXPECT_EQ(with_servers(list("a:4,b:4"), "c:2,b"), "ssh a:4 b:4 | c:2 b:1");
  EXPECT_EQ(with_servers({}, "c"), "ssh | c:1");
  EXPECT_EQ(with_servers({}, "localhost:2"), "ssh | " + sys::host_name() + ":2*");
  EXPECT_EQ(with_servers(list("localhost"), "localhost:2"), "ssh localhost:1* | localhost:2*");
  EXPECT_EQ(with_servers(list("localhost"), sys::host_name()), "ssh localhost:1* | localhost:1*");
  EXPECT_NE(with_servers(list("a"), "-x").find("--server-hosts -x"), std::string::npos);
  EXPECT_NE(with_servers(list("a"), "component 0").find("no heterogeneous job"), std::string::npos);
  // Of an allocation, whole nodes.
  const std::vector<std::string> plain = {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-3]", "SLURM_TASKS_PER_NODE=2(x3)"};
  EXPECT_EQ(with_servers({}, "n3", plain), "srun n1:2 n2:2 | n3:1");
  EXPECT_EQ(with_servers({}, "n3,elsewhere", plain), "ssh n1:2 n2:2 | n3:1 elsewhere:1");
  EXPECT_EQ(with_servers(list("n1,n3"), "n3:4", plain), "srun n1:1 n3:1 | n3:4");
  EXPECT_NE(with_servers({}, "n[1-3]", plain).find("--server-hosts"), std::string::npos);
  EXPECT_NE(with_servers({}, "n1,n2,n3", plain).find("none is left for ranks"), std::string::npos);
  const std::vector<std::string> parts = {"SLURM_JOB_ID=7",
                                          "SLURM_HET_SIZE=2",
                                          "SLURM_JOB_NODELIST_HET_GROUP_0=n[1-2]",
                                          "SLURM_TASKS_PER_NODE_HET_GROUP_0=4(x2)",
                                          "SLURM_JOB_NODELIST_HET_GROUP_1=m1",
                                          "SLURM_TASKS_PER_NODE_HET_GROUP_1=2"};
  EXPECT_EQ(with_servers({}, "component 1", parts), "srun n1:4 n2:4 | m1:2");
  EXPECT_NE(with_servers({}, "component 2", parts).find("components 0 to 1"), std::string::npos);
}

TEST(Hosts, ATaskOfAStepIsOnItsOwn) {
  auto task = kAllocation;
  task.insert(task.end(), {"SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=3"});
  EXPECT_EQ(chosen({}, task), "ssh");
  task.back() = "SLURM_STEP_NUM_TASKS=1";
  EXPECT_EQ(chosen({}, task), "srun n1:2 n2:2 n3:1");
}

TEST(Hosts, ASingleNodeIsUsedAsAnyHost) {
  EXPECT_EQ(chosen({}, {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=" + sys::host_name(), "SLURM_TASKS_PER_NODE=1"}), "ssh");
}

TEST(Hosts, AFileIsReadAndItsErrorsNameIt) {
  char folder[] = "/tmp/cohort-hosts-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  HostOptions wishes;
  wishes.file = std::string(folder) + "/hosts";
  EXPECT_NE(chosen(wishes).find("No such file"), std::string::npos);
  std::ofstream(wishes.file) << "# two\na slots=2\nb:3\n";
  EXPECT_EQ(chosen(wishes), "ssh a:2 b:3");
  std::ofstream(wishes.file) << "a slots=many\n";
  EXPECT_NE(chosen(wishes).find(wishes.file), std::string::npos);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace cohort::launch
