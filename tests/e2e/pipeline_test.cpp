// A stage of a pipeline is killed under `cohort run`: it is named by the command and on all other stages, at once.
#include "launch_harness.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

namespace cohort::test {
namespace {

TEST(PipelineJob, NamesAStageThatIsKilledOnAllOthers) {
  constexpr int kRanks = 4;
  const std::string victim = "rank 2 is process ";
  Job job({{"run", "-np", std::to_string(kRanks), PIPELINE_PEER}});
  ASSERT_TRUE(eventually([&] {
    std::size_t said = 0;
    for (const std::string& line : lines_of(job.out())) said += line.find(" is process ") != std::string::npos;
    return said == kRanks;
  })) << job.err();
  const pid_t pid = std::stoi(job.out().substr(job.out().find(victim) + victim.size()));
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  const auto killed = std::chrono::steady_clock::now();
  for (const int rank : {0, 1, 3}) {
    const std::string file = "error." + std::to_string(rank);
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(job.folder() + "/" + file); })) << rank;
    const std::string error = job.file(file);
    EXPECT_TRUE(error.rfind("PeerLost", 0) == 0 || error.rfind("Aborted", 0) == 0) << error;
    EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
  }
  const auto took = std::chrono::steady_clock::now() - killed;
  EXPECT_LT(took, 20s);  // 0.1 s on an idle machine; no operation's time is over by then
  std::printf("named on all after %.0f ms\n", std::chrono::duration<double, std::milli>(took).count());
  EXPECT_NE(job.wait(), 0);
  EXPECT_NE(job.err().find("rank 2 failed: killed by SIGKILL"), std::string::npos) << job.err();
}

}  // namespace
}  // namespace cohort::test
