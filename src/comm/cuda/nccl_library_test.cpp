// NCCL as it is found and loaded: which of several, and which versions. Over the fake one.
#include "comm/cuda/nccl.h"
#include "comm/testing/gpus.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace cohort::comm::testing {
namespace {

TEST(NcclLibrary, VersionsThatAreTooOldAreRefused) {
  ::setenv("FAKE_NCCL_VERSION", "21705", 1);
  const auto old = cuda::Nccl::load("");
  ::setenv("FAKE_NCCL_VERSION", "21800", 1);
  const auto oldest = cuda::Nccl::load("");
  ::unsetenv("FAKE_NCCL_VERSION");
  ASSERT_FALSE(old);
  EXPECT_TRUE(has(old.error().what(), "NCCL 2.17.5 is too old")) << old.error().what();
  EXPECT_TRUE(has(old.error().what(), "2.18.0 or newer is needed")) << old.error().what();
  ASSERT_TRUE(oldest) << oldest.error().what();
  EXPECT_EQ(oldest->version, 21800);
  EXPECT_FALSE(cuda::Nccl::load("off"));
}

TEST(NcclLibraryDeathTest, IsFoundWhereItIs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that has none yet
  const auto ask = [](const char* chosen) {
    const auto found = cuda::Nccl::load(chosen);
    std::fprintf(stderr, "%s", found ? found->path.c_str() : found.error().what());
    std::exit(found ? 0 : 1);
  };
  EXPECT_EXIT(ask("/nowhere/libnccl.so.2"), ::testing::ExitedWithCode(1), "there is no NCCL: /nowhere/libnccl.so.2");
  EXPECT_EXIT(ask(""), ::testing::ExitedWithCode(0), "fake/libnccl.so.2");
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("cohort-nccl-" + std::to_string(::getpid()));
  const fs::path wheel = root / "lib" / "python3.11" / "site-packages" / "nvidia" / "nccl" / "lib";
  fs::create_directories(wheel);
  const std::string folders = std::getenv("LD_LIBRARY_PATH");
  fs::copy_file(fs::path(folders.substr(0, folders.find(':'))) / "libnccl.so.2", wheel / "libnccl.so.2");
  ::setenv("VIRTUAL_ENV", root.c_str(), 1);
  EXPECT_EXIT(ask(""), ::testing::ExitedWithCode(0), "site-packages/nvidia/nccl/lib/libnccl.so.2");
  ::unsetenv("VIRTUAL_ENV");
  fs::remove_all(root);
}

}  // namespace
}  // namespace cohort::comm::testing
