#include "launch/record/warnings_file.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

namespace cohort::launch {
namespace {

TEST(WarningsFile, KeepsWholeLinesAndLooksAtTheDisk) {
  std::string name = (std::filesystem::temp_directory_path() / "cohort-warnings-XXXXXX").string();
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const auto folder = make_run_folder({.path = name, .program_name = "p", .id = "1"});
  ASSERT_TRUE(folder.has_value());
  for (const char* line : {"{\"a\":1}\n", "{\"a\":2}\n"}) {  // as two jobs in the same folder would
    WarningsFile file(*folder);
    file.append(line);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!file.room() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_TRUE(file.room().has_value());
    EXPECT_GT(file.room()->size, 0U);
    EXPECT_LE(file.room()->free, file.room()->size);
  }
  std::ifstream in(name + "/warnings.jsonl");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "{\"a\":1}\n{\"a\":2}\n");
  std::filesystem::remove_all(name);
}

TEST(WarningsFile, NearlyFullIsLittleInEveryMeasure) {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  EXPECT_TRUE(nearly_full({4 << 20, 100 << 10}));
  EXPECT_TRUE(nearly_full({1000 * kGiB, 9 * kGiB}));
  EXPECT_FALSE(nearly_full({1000 * kGiB, 11 * kGiB})) << "room for many checkpoints";
  EXPECT_FALSE(nearly_full({4 << 20, 1 << 20}));
  EXPECT_FALSE(nearly_full({0, 0}));
}

}  // namespace
}  // namespace cohort::launch
