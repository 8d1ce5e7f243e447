#include "sys/gpus.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace cohort::sys {
namespace {

TEST(Gpus, AreCountedByTheirDevices) {
  const std::filesystem::path root = ::testing::TempDir() + "cohort-gpus-" + std::to_string(::getpid());
  EXPECT_EQ(gpus_here(root), 0);
  const auto nodes = root / "sys/class/kfd/kfd/topology/nodes";
  for (const auto& [node, id] : {std::pair("0", "0"), std::pair("1", "4711"), std::pair("2", "4712")}) {
    std::filesystem::create_directories(nodes / node);
    std::ofstream(nodes / node / "gpu_id") << id << "\n";
  }
  EXPECT_EQ(gpus_here(root), 2);
  std::filesystem::create_directories(root / "dev");
  for (const char* name : {"nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia"})
    std::ofstream(root / "dev" / name);
  EXPECT_EQ(gpus_here(root), 3);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace cohort::sys
