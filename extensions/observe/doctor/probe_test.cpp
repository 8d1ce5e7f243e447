// Tests facts found on a host, with a fake system where the real one cannot be broken.
#include "observe/doctor/probe.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace cohort::doctor {
namespace {

namespace fs = std::filesystem;

/// A folder that has the files of a system.
class PretendedHost : public testing::Test {
 protected:
  PretendedHost() {
    std::string name = (fs::temp_directory_path() / "cohort-doctor-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    put("sys/devices/system/cpu/online", "0-7\n");
    put("sys/devices/system/node/online", "0-1\n");
    put("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4\n");
    put("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-5\n");
    put("proc/self/cgroup", "0::/job/step\n");
    put("proc/loadavg", "7.25 3 1 1/2 3\n");
    put("proc/meminfo", "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n");
    put("proc/cpuinfo", "processor\t: 0\nmodel name\t: Fake 3000\n");
    fs::create_directories(root_ + "/dev/shm");
  }
  ~PretendedHost() override { fs::remove_all(root_); }
  void put(const std::string& path, const std::string& text) const {
    const fs::path whole = root_ + "/" + path;
    fs::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  std::string root_;
};

TEST_F(PretendedHost, SaysWhatAHostIs) {
  const MachineFacts facts = probe_machine(root_);
  EXPECT_EQ(facts.processor, "Fake 3000");
  EXPECT_EQ(facts.processors, 8);
  EXPECT_EQ(facts.affinity, 6);
  EXPECT_EQ(facts.cores, 6);
  EXPECT_EQ(facts.numa_nodes, 2);
  EXPECT_EQ(facts.threads, 2);
  EXPECT_EQ(facts.load, 7.25);
  EXPECT_EQ(facts.memory, 16000000LL * 1024);
  EXPECT_EQ(facts.memory_available, 8000000LL * 1024);
  EXPECT_EQ(facts.memory_limit, 0);
  EXPECT_GT(facts.shared, 0);
  EXPECT_FALSE(facts.infiniband);
  put("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n");
  EXPECT_EQ(probe_machine(root_).processor, "ARM, implementer 0x41, part 0xd40");
}

TEST_F(PretendedHost, TheLeastQuotaAndLimitOfTheGroupsCount) {
  put("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  put("sys/fs/cgroup/job/cpu.max", "250000 100000\n");
  put("sys/fs/cgroup/job/memory.max", "1073741824\n");
  MachineFacts facts = probe_machine(root_);
  EXPECT_EQ(facts.quota, 2.5);
  EXPECT_EQ(facts.cores, 3);
  EXPECT_EQ(facts.memory_limit, 1073741824);
  // Files of control groups of version 1.
  put("proc/self/cgroup", "4:cpu,cpuacct:/a\n7:memory:/b\n");
  put("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000\n");
  put("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  put("sys/fs/cgroup/memory/b/memory.limit_in_bytes", "9223372036854771712\n");
  facts = probe_machine(root_);
  EXPECT_EQ(facts.quota, 1.5);
  EXPECT_EQ(facts.memory_limit, 0);
}

TEST_F(PretendedHost, SharedMemoryThatIsNotThereIsSaid) {
  fs::remove_all(root_ + "/dev");
  EXPECT_NE(probe_machine(root_).shared_error, "");
}

TEST_F(PretendedHost, InfinibandIsSeen) {
  fs::create_directories(root_ + "/sys/class/infiniband/mlx5_0");
  EXPECT_TRUE(probe_machine(root_).infiniband);
}

TEST_F(PretendedHost, GpusAreThoseOfTheDriver) {
  put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC\n");
  put("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA A100\nIRQ: 1\n");
  put("proc/driver/nvidia/gpus/0000:02:00.0/information", "Model: \t\t NVIDIA A100\nIRQ: 2\n");
  // An nvidia-smi that fails, like after an upgrade without a reboot.
  const std::string before = std::getenv("PATH");
  put("bin/nvidia-smi", "#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n");
  fs::permissions(root_ + "/bin/nvidia-smi", fs::perms::owner_all);
  ::setenv("PATH", (root_ + "/bin:" + before).c_str(), 1);
  MachineFacts facts;
  probe_gpus(facts, root_, std::chrono::seconds(20));
  EXPECT_EQ(facts.gpus, (std::vector<std::string>{"NVIDIA A100", "NVIDIA A100"}));
  EXPECT_EQ(facts.gpu_driver, "535.104.05");
  EXPECT_EQ(facts.gpu_error, "Driver/library version mismatch");
  put("bin/nvidia-smi", "#!/bin/sh\necho 'NVIDIA A100-SXM4, 535.1.2'\n");
  facts = {};
  probe_gpus(facts, root_, std::chrono::seconds(20));
  EXPECT_EQ(facts.gpus, (std::vector<std::string>{"NVIDIA A100-SXM4"}));
  EXPECT_EQ(facts.gpu_driver, "535.1.2");
  EXPECT_EQ(facts.gpu_error, "");
  ::setenv("PATH", before.c_str(), 1);
}

TEST_F(PretendedHost, WaysBetweenGpusAndNodesOfCards) {
  put("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: A100\n");
  put("proc/driver/nvidia/gpus/0000:82:00.0/information", "Model: A100\n");
  put("sys/bus/pci/devices/0000:01:00.0/numa_node", "0\n");
  put("sys/bus/pci/devices/0000:82:00.0/numa_node", "1\n");
  put("sys/class/net/eth0/device/numa_node", "0\n");
  put("sys/class/net/lo/mtu", "65536\n");
  put("bin/nvidia-smi", R"(#!/bin/sh
case "$2" in
  -m) printf '\t\033[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n'
      printf 'GPU0\t X \tSYS\tPIX\t0-31\t0\t\tN/A\nGPU1\tSYS\t X \tSYS\t32-63\t1\t\tN/A\n'
      printf 'mlx5_0\tPIX\tSYS\t X \n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n' ;;
  -p2p) printf ' \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tCNS\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n' ;;
esac
)");
  fs::permissions(root_ + "/bin/nvidia-smi", fs::perms::owner_all);
  const std::string before = std::getenv("PATH");
  ::setenv("PATH", (root_ + "/bin:" + before).c_str(), 1);
  MachineFacts facts;
  facts.gpus = {"A100", "A100"};
  probe_gpu_links(facts, root_, std::chrono::seconds(20));
  ::setenv("PATH", before.c_str(), 1);
  EXPECT_EQ(facts.gpu_nodes, (std::vector<int>{0, 1}));
  EXPECT_EQ(facts.card_nodes, (std::map<std::string, int>{{"eth0", 0}}));
  EXPECT_EQ(facts.gpu_links, "SYS between all");
  EXPECT_EQ(facts.gpu_strangers, "0 and 1 (CNS)");
}

TEST(GpuWays, TheSlowestIsNamed) {
  const auto pairs = parse_gpu_pairs(
      "\tGPU0\tGPU1\tGPU2\tNIC0\n"
      "GPU0\t X \tNV18\tSYS\tPIX\nGPU1\tNV18\t X \tNODE\tSYS\nGPU2\tSYS\tNODE\t X \tSYS\n"
      "NIC0\tPIX\tSYS\tSYS\t X \n");
  ASSERT_EQ(pairs.size(), 3U);
  EXPECT_EQ(describe_ways(pairs), "NV18 at best, SYS between 0 and 2");
  EXPECT_EQ(describe_ways(parse_gpu_pairs("\tGPU0\nGPU0\t X \n")), "");
  EXPECT_TRUE(parse_gpu_pairs("No devices were found").empty());
  EXPECT_TRUE(parse_gpu_pairs("GPU0 GPU1\nGPU0\nGPU1 X").empty());
  EXPECT_EQ(describe_strangers({{0, 1, "OK"}, {0, 2, "GNS"}, {1, 2, "GNS"}}), "0 and 2 (GNS), and 1 more");
  EXPECT_EQ(describe_strangers({{0, 1, "OK"}}), "");
}

TEST(Look, LimitsAreThoseOfTheProcess) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_CORE, &before), 0);
  const rlimit changed{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_CORE, &changed), 0);
  EXPECT_EQ(probe_limits().core, 0);
  ::setrlimit(RLIMIT_CORE, &before);
}

TEST(Look, AFolderIsLookedAtAsAJobDoes) {
  EXPECT_NE(probe_folder("/nowhere/at/all").error.find("/nowhere/at/all"), std::string::npos);
  const FolderFacts facts = probe_folder(fs::temp_directory_path().string());
  EXPECT_EQ(facts.error, "");
  EXPECT_TRUE(facts.writable);
  EXPECT_GT(facts.free, 0);
}

TEST(Look, NamesAreLookedUpByTheDeadline) {
  const auto names = resolve_names({"127.0.0.1", "no-such-host.invalid"}, std::chrono::seconds(10));
  ASSERT_EQ(names.size(), 2U);
  EXPECT_EQ(names[0].addresses, std::vector<std::string>{"127.0.0.1"});
  EXPECT_TRUE(names[1].addresses.empty());
  EXPECT_NE(names[1].error, "");
}

TEST(Look, OnlyVariablesThatMatterAreTold) {
  launch::Environment environment;
  environment.set("COHORT_ALONE", "1");
  environment.set("MY_PASSWORD", "x");
  environment.set("CUDA_VISIBLE_DEVICES", "");
  const auto variables = variables_that_matter(environment);
  EXPECT_EQ(variables.size(), 2U);
  EXPECT_EQ(variables.at("CUDA_VISIBLE_DEVICES"), "");
}

}  // namespace
}  // namespace cohort::doctor
