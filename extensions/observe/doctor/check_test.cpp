// Tests each row with made-up facts in which exactly that row is broken.

#include "observe/doctor/check.h"
#include "launch/start/starter.h"
#include "observe/doctor/examination.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace cohort::doctor {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

HostState healthy(const std::string& name, int number) {
  HostState host;
  host.name = name;
  host.here = number == 1;
  host.slots = 2;
  HostFacts facts;
  facts.name = name;
  facts.port = 4000 + number;
  facts.networks = {{"eth0", "10.0.0." + std::to_string(number), 1500, 0}, {"docker0", "172.17.0.1", 1500, 1}};
  facts.names = {{name, {"10.0.0." + std::to_string(number)}, {}}};
  facts.limits = {1024, 1048576, 30000, 8 << 20, 0};
  facts.machine.processor = "Some CPU";
  facts.machine.processors = facts.machine.affinity = facts.machine.cores = 8;
  facts.machine.numa_nodes = 1;
  facts.machine.threads = 2;
  facts.machine.load = 0.1;
  facts.machine.memory = 64 * kGiB;
  facts.machine.memory_available = 60 * kGiB;
  facts.machine.shared = facts.machine.shared_free = 32 * kGiB;
  facts.software = {"1.0", "GNU", "cohort (build id 1)", "/c", "3.11.2", "/p", "", "2.5.1", "1.0", "Open MPI 4.1.4"};
  facts.folder = {"/home/me", "", true, 100 * kGiB, "nfs"};
  host.facts = facts;
  host.clock_offset = 0.001;
  host.clock_error = 0.001;
  host.same_folder = true;
  return host;
}

class Doctor : public testing::Test {
 protected:
  Doctor() {
    checkup.here = "a";
    checkup.several_hosts = true;
    checkup.hosts = {healthy("a", 1), healthy("b", 2)};
    for (int from = 0; from < 2; ++from) {
      const int to = 1 - from;
      checkup.hosts[static_cast<std::size_t>(from)].facts->names.push_back(
          {to == 0 ? "a" : "b", {"10.0.0." + std::to_string(to + 1)}, {}});
      checkup.probes.push_back({from, {to, "10.0.0." + std::to_string(to + 1), std::string(kReached), "", "", 0.2}});
      checkup.probes.push_back({from, {to, "172.17.0.1", std::string(kRefused), "", "", 0}});
    }
    checkup.speeds = {{0, 1, "10.0.0.2", 1.1e9, 1.2e9, 0.2, ""}};
  }
  HostFacts& b() { return *checkup.hosts[1].facts; }

  /// Returns the finding of this row, after checking that it is the only one that is not Ok.
  Finding only(const std::string& row, Level level) {
    const auto all = judge(checkup);
    std::vector<Finding> bad;
    for (const Finding& finding : all) {
      if (finding.level != Level::Ok) bad.push_back(finding);
    }
    if (bad.size() != 1 || bad.front().row != row || bad.front().level != level) {
      ADD_FAILURE() << to_table(checkup, all, Colour::No);
      return {};
    }
    EXPECT_NE(bad.front().found, "");
    EXPECT_NE(bad.front().fix, "");
    EXPECT_NE(to_table(checkup, all, Colour::No).find(std::string(level_name(level))), std::string::npos);
    return bad.front();
  }
  std::vector<Finding> bad() {
    auto all = judge(checkup);
    std::erase_if(all, [](const Finding& finding) { return finding.level == Level::Ok; });
    return all;
  }
  std::string in_order(const std::string& row) {
    for (const Finding& finding : judge(checkup)) {
      if (finding.row == row && finding.level == Level::Ok) return finding.found;
    }
    return "nothing";
  }

  Checkup checkup;
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(Doctor, HasNothingToSayOfHealthyHosts) {
  EXPECT_TRUE(bad().empty()) << to_table(checkup, judge(checkup), Colour::No);
  EXPECT_TRUE(has(to_table(checkup, judge(checkup), Colour::No), "All in order."));
  EXPECT_TRUE(has(in_order("network"), "docker0 leads to no other host"));
  EXPECT_TRUE(has(in_order("speed"), "10.0.0.2 (eth0): 1100 MB/s there, 1200 MB/s back, 0.20 ms"));
  EXPECT_EQ(in_order("core-dumps"), "off");
  EXPECT_EQ(in_order("numa"), "1 NUMA node, 2 threads a core");
}

// --- the environment ---

TEST_F(Doctor, AContradictionOfLaunchers) {
  checkup.environment = {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"RANK", "0"},
                         {"WORLD_SIZE", "1"},           {"MASTER_ADDR", "10.0.0.1"},   {"MASTER_PORT", "1"}};
  checkup.launcher_alive = true;
  const Finding finding = only("launcher", Level::Failed);
  EXPECT_TRUE(has(finding.found, "WORLD_SIZE=1")) << finding.found;
}

TEST_F(Doctor, ABatchScriptIsNoTask) {
  checkup.environment = {{"SLURM_JOB_ID", "7"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_JOB_NODELIST", "a,b"},
                         {"SLURM_STEP_ID", "4294967291"},
                         {"SLURM_PROCID", "0"}};
  EXPECT_TRUE(has(only("batch", Level::Warning).fix, "srun"));
}

TEST_F(Doctor, OneProcessWhereThereAreSeveralGpus) {
  checkup.environment = {{"SM_NUM_GPUS", "4"}};
  EXPECT_TRUE(has(only("one-process", Level::Warning).fix, "cohort run -np 4"));
}

TEST_F(Doctor, AWorldOnEachHost) {
  checkup.environment = {{"RANK", "0"},
                         {"WORLD_SIZE", "4"},
                         {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "10.0.0.1"},
                         {"MASTER_PORT", "1"},
                         {"TORCHELASTIC_RUN_ID", "none"},
                         {"SM_CURRENT_HOST", "algo-1"},
                         {"SM_HOSTS", R"(["algo-1","algo-2"])"}};
  checkup.launcher_alive = true;
  // A `cohort run` in each of torchrun's ranks is no launcher, either.
  const auto found = bad();
  ASSERT_EQ(found.size(), 2U) << to_table(checkup, judge(checkup), Colour::No);
  EXPECT_EQ(found[0].row, "apart");
  EXPECT_TRUE(has(found[0].found, "one of 2 hosts of a job")) << found[0].found;
  EXPECT_EQ(found[1].row, "launchers");
}

TEST_F(Doctor, LaunchersOfOneJobAndThoseThatAreRefused) {
  checkup.environment = {{"SLURM_STEP_ID", "0"},        {"SLURM_PROCID", "1"},
                         {"SLURM_NODEID", "1"},         {"SLURM_STEP_NUM_TASKS", "2"},
                         {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
  EXPECT_TRUE(has(in_order("launchers"), "is node 1 of 2, which make one job")) << in_order("launchers");
  checkup.environment = {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "0"}};
  checkup.launcher_alive = true;
  EXPECT_TRUE(has(only("launchers", Level::Warning).found, "`mpirun -np 4 PROGRAM`"));
}

TEST_F(Doctor, Alone) {
  checkup.environment = {{"COHORT_ALONE", "1"}};
  EXPECT_TRUE(has(only("alone", Level::Failed).fix, "unset COHORT_ALONE"));
}

TEST_F(Doctor, PretendedHosts) {
  checkup.environment = {{"COHORT_PRETEND_HOSTS", "2"}};
  only("pretend", Level::Warning);
}

TEST_F(Doctor, ALoopbackMasterOfSeveralHosts) {
  checkup.environment = {{"MASTER_ADDR", "localhost"}};
  EXPECT_TRUE(has(only("master", Level::Failed).found, "MASTER_ADDR=localhost"));
  checkup.several_hosts = false;
  EXPECT_TRUE(bad().empty());
}

TEST_F(Doctor, LeftoversOfALauncherThatIsGone) {
  checkup.environment = {{"TORCHELASTIC_RUN_ID", "x"},
                         {"RANK", "1"},
                         {"WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "10.0.0.1"},
                         {"MASTER_PORT", "1"}};
  const Finding finding = only("leftovers", Level::Warning);
  EXPECT_TRUE(has(finding.found, "torchrun")) << finding.found;
  EXPECT_TRUE(has(finding.fix, "-u TORCHELASTIC_RUN_ID"));
  checkup.launcher_alive = true;
  EXPECT_TRUE(has(only("launchers", Level::Warning).found, "`torchrun ... PROGRAM`"));
}

TEST_F(Doctor, AnInterfaceThatIsNotThere) {
  b().environment["GLOO_SOCKET_IFNAME"] = "ib7";
  const Finding finding = only("interface", Level::Warning);
  EXPECT_TRUE(has(finding.found, "ib7"));
  EXPECT_TRUE(has(finding.found, "eth0"));
  b().environment["GLOO_SOCKET_IFNAME"] = "eth0";
  b().environment["NCCL_SOCKET_IFNAME"] = "^docker0";
  EXPECT_TRUE(bad().empty());
}

TEST_F(Doctor, ANetworkThatFitsNothing) {
  b().network_error = "COHORT_NETWORK fits no address";
  EXPECT_TRUE(has(only("network-choice", Level::Failed).fix, "--network"));
}

TEST_F(Doctor, AProxyDoesNoHarm) {
  checkup.environment = {{"http_proxy", "http://p:1"}};
  EXPECT_TRUE(bad().empty());
  EXPECT_TRUE(has(in_order("proxy"), "http_proxy"));
}

TEST_F(Doctor, HiddenGpus) {
  for (HostState& host : checkup.hosts) {
    host.facts->machine.gpus = {"A100", "A100"};
    host.facts->machine.gpu_driver = "535.1";
  }
  b().environment["CUDA_VISIBLE_DEVICES"] = "";
  only("gpu-choice", Level::Warning);
}

TEST_F(Doctor, MoreThreadsThanCores) {
  b().environment["OMP_NUM_THREADS"] = "8";
  EXPECT_TRUE(has(only("threads", Level::Warning).fix, "OMP_NUM_THREADS=4"));
}

// Reaching hosts.

TEST_F(Doctor, EveryWayNotToReachAHostIsARow) {
  struct Case {
    const char* said;
    const char* row;
  };
  for (const Case& c :
       {Case{"REMOTE HOST IDENTIFICATION HAS CHANGED", "ssh-key-changed"},
        Case{"Host key verification failed.", "ssh-host-key"}, Case{"b: Permission denied (publickey).", "ssh-login"},
        Case{"Too many authentication failures", "ssh-login"}, Case{"Could not resolve hostname b", "ssh-name"},
        Case{"connect to host b port 22: Connection refused", "ssh-reach"},
        Case{"connect to host b port 22: No route to host", "ssh-reach"},
        Case{"Bad configuration option: x", "ssh-config"}}) {
    launch::FailedStart failed;
    failed.host = "b";
    failed.status = sys::ExitStatus{255, 0, false};
    failed.complaints = c.said;
    EXPECT_EQ(launch::diagnose(failed).kind, c.row) << c.said;
  }
  launch::FailedStart failed;
  failed.host = "b";
  EXPECT_EQ(launch::diagnose(failed).kind, "silent");
  failed.status = sys::ExitStatus{3, 0, false};
  EXPECT_EQ(launch::diagnose(failed).kind, "shell-exits");
  failed.status = sys::ExitStatus{127, 0, false};
  EXPECT_EQ(launch::diagnose(failed).kind, "command");
  failed.announced = true;
  EXPECT_EQ(launch::diagnose(failed).kind, "control");
  failed.announced = false;
  failed.method = launch::StartMethod::Slurm;
  failed.status = sys::ExitStatus{1, 0, false};
  EXPECT_EQ(launch::diagnose(failed).kind, "starter");
  EXPECT_NO_THROW(row("starter"));
}

TEST_F(Doctor, AHostThatIsNotReached) {
  HostState& host = checkup.hosts[1];
  host.facts.reset();
  host.clock_offset.reset();
  host.same_folder.reset();
  host.trouble = "ssh-login";
  host.why = "ssh cannot log in without a password";
  host.fix = "ssh-copy-id b";
  checkup.probes.clear();
  checkup.speeds.clear();
  EXPECT_EQ(only("ssh-login", Level::Failed).hosts, std::vector<std::string>{"b"});
}

TEST_F(Doctor, AShellThatPrints) {
  checkup.hosts[1].printed = "welcome";
  EXPECT_TRUE(has(only("shell-prints", Level::Warning).found, "welcome"));
}

// Names and software.

TEST_F(Doctor, AnOwnNameThatIsLoopback) {
  b().names.front().addresses = {"127.0.1.1"};
  const Finding finding = only("own-name", Level::Warning);
  EXPECT_TRUE(has(finding.found, "127.0.1.1"));
  EXPECT_TRUE(has(finding.fix, "/etc/hosts: 10.0.0.2 b")) << finding.fix;
}

TEST_F(Doctor, NamesThatAreUnknownOrWrong) {
  b().names[1] = {"a", {}, "unknown"};
  EXPECT_TRUE(has(only("names", Level::Warning).found, "does not know a"));
  b().names[1] = {"a", {"10.9.9.9"}, {}};
  EXPECT_TRUE(has(only("names", Level::Warning).found, "a means 10.9.9.9"));
  b().names[1] = {"a", {"10.0.0.1"}, {}};
  checkup.names_here = {{"b", {}, "unknown"}};
  EXPECT_TRUE(has(only("names", Level::Warning).found, "b does not resolve here"));
}

TEST_F(Doctor, SoftwareThatDiffers) {
  b().software.commit = "cohort (build id 2)";
  EXPECT_TRUE(has(only("build", Level::Warning).found, "build id 2) (b)"));
  b().software.commit = "cohort (build id 1)";
  b().software.python = "3.9.1";
  EXPECT_TRUE(has(only("python", Level::Warning).found, "3.9.1 (b)"));
  b().software.python = "3.11.2";
  b().software.torch = "2.0.0";
  only("torch", Level::Failed);
  b().software.torch = "";
  EXPECT_TRUE(has(only("torch", Level::Warning).found, "none (b)"));
  b().software.torch = "2.5.1";
  b().software.mpi = "MPICH (Hydra)";
  only("mpi", Level::Warning);
  b().software.mpi = "Open MPI 4.1.4";
  b().software.version = "0.9";
  only("version", Level::Failed);
}

// --- between hosts ---

TEST_F(Doctor, AFirewallThatDropsAndOneThatRejects) {
  checkup.speeds.clear();
  for (auto& probe : checkup.probes) {
    if (probe.facts.address == "10.0.0.2") probe.facts.result = kNoAnswer;
  }
  Finding finding = only("direction", Level::Warning);
  for (auto& probe : checkup.probes) {
    if (probe.facts.address == "10.0.0.1") probe.facts.result = kNoAnswer;
  }
  ASSERT_EQ(bad().size(), 2U);
  finding = bad().front();
  EXPECT_EQ(finding.row, "reach");
  EXPECT_EQ(finding.level, Level::Failed);
  EXPECT_TRUE(has(finding.found, "10.0.0.2 (eth0): no answer")) << finding.found;
  EXPECT_TRUE(has(finding.fix, "drops"));
  for (auto& probe : checkup.probes) probe.facts.result = kRefused;
  EXPECT_TRUE(has(bad().front().fix, "rejects"));
  for (auto& probe : checkup.probes) probe.facts.result = kNoRoute;
  EXPECT_TRUE(has(bad().front().fix, "ip route get"));
}

TEST_F(Doctor, AHostThatHadNoTime) {
  checkup.silent = {1};
  EXPECT_TRUE(has(only("reach", Level::Warning).found, "no time"));
}

TEST_F(Doctor, LargePacketsThatAreLost) {
  checkup.speeds.clear();
  for (auto& probe : checkup.probes) {
    if (probe.facts.address == "10.0.0.2") probe.facts.result = kLargeLost;
  }
  b().networks.front().mtu = 9000;
  const Finding finding = only("large", Level::Failed);
  EXPECT_TRUE(has(finding.found, "MTU 9000"));
  EXPECT_TRUE(has(finding.fix, "mtu 1500"));
}

TEST_F(Doctor, AWrongNetworkInFront) {
  for (HostState& host : checkup.hosts) host.facts->networks.front().offered = 1;
  for (HostState& host : checkup.hosts) host.facts->networks.back().offered = 0;
  const auto found = bad();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found.front().row, "network");
  EXPECT_TRUE(has(found.front().fix, "--network"));
}

TEST_F(Doctor, ASlowWay) {
  checkup.speeds = {{0, 1, "10.0.0.2", 11e6, 11e6, 0.2, ""}};
  EXPECT_TRUE(has(only("speed", Level::Warning).found, "11 MB/s"));
  checkup.speeds = {{0, 1, "10.0.0.2", 0, 0, 0, "the transfer did not get through"}};
  only("speed", Level::Warning);
}

TEST_F(Doctor, ClocksThatAreApart) {
  checkup.hosts[1].clock_offset = -90;
  const Finding finding = only("clock", Level::Warning);
  EXPECT_TRUE(has(finding.found, "90.0 s behind a's")) << finding.found;
  // A slow answer does not prove that the clocks differ.
  checkup.hosts[1].clock_offset = 1.5;
  checkup.hosts[1].clock_error = 0.6;
  EXPECT_TRUE(bad().empty());
}

// --- resources of a host ---

TEST_F(Doctor, CoresQuotaAndLoad) {
  checkup.hosts[1].slots = 16;
  EXPECT_TRUE(has(only("cores", Level::Warning).fix, "-H b:8"));
  checkup.hosts[1].slots = 2;
  b().machine.quota = 1.5;
  EXPECT_TRUE(has(only("quota", Level::Warning).found, "1.5 of 8"));
  b().machine.quota = 0;
  b().machine.load = 9;
  only("load", Level::Warning);
}

TEST_F(Doctor, LittleMemory) {
  b().machine.memory_limit = kGiB / 2;
  EXPECT_TRUE(has(only("memory", Level::Warning).found, "512 MiB"));
}

TEST_F(Doctor, GpusThatFailOrDiffer) {
  b().machine.gpus = {"A100"};
  b().machine.gpu_driver = "535.1";
  b().machine.gpu_error = "Driver/library version mismatch";
  const auto found = bad();
  ASSERT_EQ(found.front().row, "gpus");
  EXPECT_EQ(found.front().level, Level::Failed);
  EXPECT_TRUE(has(found.front().found, "mismatch"));
  EXPECT_EQ(found.back().row, "alike");
}

TEST_F(Doctor, NcclThatIsMissing) {
  for (HostState& host : checkup.hosts) {
    host.facts->machine.gpus = {"A100", "A100"};
    host.facts->machine.nccl = "2.30.7";
  }
  EXPECT_TRUE(bad().empty());
  for (HostState& host : checkup.hosts) {
    host.facts->machine.nccl.clear();
    host.facts->machine.nccl_error = "there is no NCCL";
  }
  const auto found = bad();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.front().row, "nccl");
  EXPECT_EQ(found.front().level, Level::Warning);
  EXPECT_EQ(found.front().found, "there is no NCCL");
}

TEST_F(Doctor, NcclThatDiffers) {
  for (HostState& host : checkup.hosts) {
    host.facts->machine.gpus = {"A100", "A100"};
    host.facts->machine.nccl = "2.30.7";
  }
  b().machine.nccl = "2.28.9";
  EXPECT_TRUE(has(only("alike", Level::Warning).found, "NCCL: 2.30.7 (a), 2.28.9 (b)"));
}

TEST_F(Doctor, MoreRanksThanGpus) {
  for (HostState& host : checkup.hosts) {
    host.facts->machine.gpus = {"A100", "A100"};
    host.facts->machine.nccl = "2.30.7";
    host.slots = 2;
  }
  EXPECT_TRUE(bad().empty());
  b().environment["CUDA_VISIBLE_DEVICES"] = "1";
  EXPECT_EQ(only("gpu-shared", Level::Warning).found, "2 ranks for 1 GPU");
}

TEST_F(Doctor, GpusThatDoNotReachEachOther) {
  for (HostState& host : checkup.hosts) {
    host.facts->machine.gpus = {"A100", "A100"};
    host.facts->machine.nccl = "2.30.7";
    host.facts->machine.gpu_links = "NV12 between all";
  }
  EXPECT_TRUE(bad().empty());
  EXPECT_TRUE(has(in_order("gpu-pairs"), "NV12 between all"));
  b().machine.gpu_strangers = "0 and 1 (CNS)";
  EXPECT_EQ(only("gpu-pairs", Level::Warning).found,
            "GPUs may not read each other's memory: 0 and 1 (CNS); NV12 between all");
}

TEST_F(Doctor, GpusThatNoNetworkCardIsNear) {
  for (HostState& host : checkup.hosts) {
    host.facts->machine.gpus = {"A100", "A100"};
    host.facts->machine.nccl = "2.30.7";
    host.facts->machine.gpu_nodes = {0, 1};
    host.facts->machine.card_nodes = {{"eth0", 0}, {"mlx5_0", 1}};
  }
  EXPECT_TRUE(bad().empty());
  b().machine.card_nodes = {{"eth0", 0}};
  EXPECT_EQ(only("gpu-cards", Level::Warning).found, "GPUs far from network cards: 1 (node 1); cards: eth0 (node 0)");
  b().machine.card_nodes = {{"eth0", -1}};
  EXPECT_TRUE(bad().empty());
}

TEST_F(Doctor, HostsThatAreNotAlike) {
  b().machine.cores = b().machine.affinity = b().machine.processors = 4;
  EXPECT_TRUE(has(only("alike", Level::Warning).found, "cores: 8 (a), 4 (b)"));
}

TEST_F(Doctor, Limits) {
  b().limits.open_files = 256;
  EXPECT_TRUE(has(only("open-files", Level::Warning).fix, "ulimit -n"));
  b().limits.open_files_most = b().limits.open_files = 20;
  only("open-files", Level::Failed);
  b().limits.open_files_most = b().limits.open_files = kUnlimited;
  b().limits.processes = 50;
  EXPECT_TRUE(has(only("processes", Level::Warning).fix, "ulimit -u"));
  b().limits.processes = kUnlimited;
  b().machine.infiniband = true;
  EXPECT_TRUE(has(only("locked", Level::Warning).fix, "memlock"));
  b().machine.infiniband = false;
  b().limits.core = kUnlimited;
  EXPECT_TRUE(bad().empty());
}

TEST_F(Doctor, SharedMemory) {
  b().machine.shared = b().machine.shared_free = kGiB / 16;
  EXPECT_TRUE(has(only("shm", Level::Warning).fix, "remount"));
  b().machine.shared = kGiB;
  b().machine.shared_free = 1000;
  EXPECT_TRUE(has(only("shm", Level::Warning).fix, "ls -la"));
  b().machine.shared_error = "No such file or directory";
  only("shm", Level::Warning);
}

// --- files ---

TEST_F(Doctor, Folders) {
  b().folder.writable = false;
  only("folder", Level::Failed);
  b().folder.writable = true;
  b().folder.free = kGiB / 10;
  only("space", Level::Warning);
  b().folder.free = 1000;
  only("space", Level::Failed);
  b().folder.free = kGiB;
  checkup.hosts[1].same_folder = false;
  EXPECT_TRUE(has(only("same-folder", Level::Warning).fix, "rsync"));
  checkup.hosts[1].same_folder.reset();
  b().folder.error = "there is no folder /home/me";
  only("folder", Level::Failed);
}

// --- text of the report ---

TEST_F(Doctor, EqualRowsOfManyHostsAreOne) {
  checkup.hosts.clear();
  checkup.probes.clear();
  checkup.speeds.clear();
  for (int i = 1; i <= 64; ++i) {
    checkup.hosts.push_back(healthy(fmt::format("node{:02}", i), i));
    checkup.hosts.back().facts->machine.load = 0.01 * i;
  }
  const std::string table = to_table(checkup, judge(checkup), Colour::No);
  EXPECT_TRUE(has(table, "all 64: 1024, up to 1048576")) << table;
  EXPECT_LT(std::count(table.begin(), table.end(), '\n'), 400) << table;
}

TEST_F(Doctor, ManyTroublesOfOneKindAreNamedInOneRow) {
  checkup.hosts.clear();
  checkup.probes.clear();
  checkup.speeds.clear();
  for (int i = 1; i <= 20; ++i) {
    HostState host;
    host.name = fmt::format("node{:02}", i);
    host.trouble = "ssh-login";
    host.why = host.name + ": Permission denied";
    host.fix = "ssh-copy-id " + host.name;
    checkup.hosts.push_back(host);
  }
  const std::string table = to_table(checkup, judge(checkup), Colour::No);
  std::istringstream stream(table);
  std::string text;
  for (std::string word; stream >> word;) text += word + " ";
  EXPECT_TRUE(has(text, "20 hosts (node01, node02,")) << table;
  EXPECT_TRUE(has(text, "node12, ...), such as node01")) << table;
  EXPECT_LT(std::count(table.begin(), table.end(), '\n'), 20) << table;
}

TEST_F(Doctor, LinesFitATerminal) {
  b().limits.open_files = 256;
  checkup.hosts[1].clock_offset = 1000;
  std::istringstream lines(to_table(checkup, judge(checkup), Colour::No));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
}

TEST_F(Doctor, JsonHasAllOfIt) {
  b().limits.open_files = 256;
  const std::string text = to_json_report(checkup, judge(checkup));
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["warnings"], 1);
  EXPECT_EQ(json["hosts"][1]["facts"]["limits"]["open_files"], 256);
  EXPECT_EQ(json["ways"].size(), 4U);
  EXPECT_EQ(json["speeds"][0]["bytes_per_second_there"], 1.1e9);
}

TEST_F(Doctor, FactsComeBackAsTheyWere) {
  const auto back = parse_host_facts(to_json(b()));
  ASSERT_TRUE(back) << back.error().what();
  EXPECT_EQ(to_json(*back), to_json(b()));
  for (const char* bad : {"", "{}", "[]", "{\"name\":\"a\"}", "{\"port\":\"x\"}", "{\"port\":70000}"})
    EXPECT_FALSE(parse_host_facts(bad)) << bad;
  for (const char* number : {"4e26", "4.5", "4294967297", "18446744073709551615"}) {
    const auto bad = fmt::format(R"({{"port":1,"machine":{{"cores":{}}}}})", number);
    EXPECT_FALSE(parse_host_facts(bad)) << bad;
  }
  EXPECT_TRUE(parse_host_facts(R"({"port":1,"machine":{"load":0.5,"quota":2},"more":7})"));
  EXPECT_FALSE(parse_host_facts(std::string(100'000, '[')));
  EXPECT_FALSE(parse_host_facts(fmt::format("{}{}", std::string(100, '['), std::string(100, ']'))));
  EXPECT_FALSE(parse_probes("[{\"peer\":-1}]"));
  EXPECT_FALSE(parse_speed("{\"from\":-1}"));
}

// --- the table of rows and its documentation; which hosts measure with each other ---

TEST(DoctorRounds, EachPairMeetsOnceAndNobodyTwiceAtATime) {
  for (std::size_t count = 0; count <= 9; ++count) {
    std::set<std::pair<std::size_t, std::size_t>> met;
    for (const Pairs& round : rounds_of_pairs(count, true)) {
      std::set<std::size_t> busy;
      for (const auto& [a, b] : round) {
        EXPECT_TRUE(met.insert({a, b}).second);
        EXPECT_TRUE(busy.insert(a).second && busy.insert(b).second && a < b && b < count);
      }
    }
    EXPECT_EQ(met.size(), count * (count == 0 ? 0 : count - 1) / 2) << count;
  }
  for (std::size_t count = 2; count <= 70; ++count) {
    std::set<std::size_t> covered;
    for (const Pairs& round : rounds_of_pairs(count, false)) {
      std::set<std::size_t> busy;
      for (const auto& [a, b] : round) {
        EXPECT_TRUE(busy.insert(a).second && busy.insert(b).second && b < count) << count;
        covered.insert({a, b});
      }
    }
    EXPECT_EQ(covered.size(), count);
  }
}

TEST(DoctorRows, EachIsInTheDocumentation) {
  std::ifstream file(COHORT_DOCTOR_PAGE);
  const std::string page{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  ASSERT_FALSE(page.empty());
  std::size_t documented = 0;
  for (std::size_t at = page.find("\n| `"); at != std::string::npos; at = page.find("\n| `", at + 1)) ++documented;
  for (const Row& each : rows()) {
    EXPECT_LE(each.title.size(), 16U) << each.id;
    EXPECT_NE(page.find(fmt::format("| `{}` | {} |", each.id, each.title)), std::string::npos) << each.id;
  }
  EXPECT_EQ(documented, rows().size());
}

}  // namespace
}  // namespace cohort::doctor
