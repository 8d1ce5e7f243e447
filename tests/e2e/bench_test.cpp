// `cohort bench` as a person runs it.
#include "launch_harness.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <csignal>

namespace cohort::test {
namespace {

constexpr const char* kCollectives = "all";

TEST(Bench, MeasuresChecksWritesAndDraws) {
  Job job({{"bench", kCollectives, "-np", "2,3", "--sizes", "4,1000,64K", "--memory", "both", "-n", "3", "-w", "1",
            "--json", "rows.json", "--plot", "rows.svg"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(job.processes().empty());
  for (const char* text : {"redop", "busbw", "#wrong", "p99.9", "bound", "2 processes", "3 processes"}) {
    EXPECT_NE(job.out().find(text), std::string::npos) << text;
  }
  int rows = 0, worlds = 0;
  for (const std::string& line : lines_of(job.file("rows.json"))) {
    const auto event = nlohmann::json::parse(line);
    worlds += event.at("event") == "world" ? 1 : 0;
    if (event.at("event") != "row") continue;
    ++rows;
    for (const char* side : {"out_of_place", "in_place"}) {
      if (!event.contains(side)) continue;
      EXPECT_EQ(event[side].at("wrong"), 0) << line;
      EXPECT_GT(event[side].at("time_us").get<double>(), 0) << line;
    }
  }
  EXPECT_EQ(worlds, 2);
  EXPECT_EQ(rows, 2 * (13 * 2 * 3 + 1));
  const std::string svg = job.file("rows.svg");
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
}

TEST(Bench, RunsInThreadsAndInsideAJob) {
  EXPECT_EQ(run({{"bench", "-np", "3", "--threads", "--sizes", "1000", "-n", "3"}}).status, 0);
  Job job({{"run", "-np", "2", COHORT_COMMAND, "bench", "--sizes", "1000", "-n", "3"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.out().find("2 ranks of the job"), std::string::npos) << job.out();
}

TEST(Bench, SaysWhatIsWrongWithItsOptions) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"bench", "al_reduce"}, "choose from all_reduce"},
      {{"bench", "-b", "8X"}, "'8X' is not a size"},
      {{"bench", "-np", "0"}, "-np 0"},
      {{"bench", "-np", "2", "--root", "2", "--sizes", "8"}, "--root 2"},
      {{"bench", "--memory", "disk"}, "--memory 'disk'"},
      {{"bench", "--json", "/nowhere/x", "--sizes", "8"}, "/nowhere/x"},
      {{"bench", "--nonsense"}, "--nonsense"},
  };
  for (const auto& [arguments, text] : cases) {
    const Finished finished = run({arguments});
    EXPECT_NE(finished.status, 0) << text;
    EXPECT_NE(finished.err.find(text), std::string::npos) << finished.err;
  }
}

TEST(Bench, ARankThatIsKilledIsNamedAndNothingIsLeft) {
  Job job({{"bench", "-np", "3", "--sizes", "64K", "-n", "10000000"}});
  ASSERT_TRUE(eventually([&] {
    return job.processes().size() == 4 && job.out().find("3 processes") != std::string::npos;
  })) << job.err();
  for (const pid_t pid : job.processes()) {
    if (pid == job.pid()) continue;
    ::kill(pid, SIGKILL);
    break;
  }
  EXPECT_EQ(job.wait(), 1);
  EXPECT_NE(job.err().find("killed by SIGKILL"), std::string::npos) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(Bench, RanksEndWithTheCommand) {
  Job job({{"bench", "-np", "3", "--sizes", "64K", "-n", "10000000"}});
  ASSERT_TRUE(eventually([&] { return job.out().find("3 processes") != std::string::npos; })) << job.err();
  job.signal(SIGKILL);
  job.wait();
  EXPECT_TRUE(eventually([&] { return job.processes().empty(); }, 5s));
}

}  // namespace
}  // namespace cohort::test
