// `cohort bench` as a person runs it.
#include "launch_harness.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <filesystem>

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
  ASSERT_TRUE(eventually([&] { return job.out().find("3 processes") != std::string::npos; })) << job.err();
  const auto ranks = job.processes(COHORT_COMMAND " bench --as-rank");
  ASSERT_EQ(ranks.size(), 3U);
  ::kill(ranks[1], SIGKILL);
  EXPECT_EQ(job.wait(), 1);
  EXPECT_NE(job.err().find("killed by SIGKILL"), std::string::npos) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(BenchTraining, OneAndTwoHostsATableAndASentence) {
  Job job({.arguments = {"bench",         "training", "-H",       "a:2,b:2", "--starter", "local", "--processes", "1,2",
                         "--hosts",       "1,2",      "--layers", "64,32,4", "--batch",   "16",    "--seconds",   "0.1",
                         "--repetitions", "1",        "--json",   "t.json",  "--svg",     "t.svg"},
           .environment = {"COHORT_PRETEND_HOSTS=2"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(job.processes().empty());
  int points = 0;
  std::string verdict;
  for (const std::string& line : lines_of(job.file("t.json"))) {
    const auto event = nlohmann::json::parse(line);
    if (event.at("event") == "verdict") verdict = event.at("text");
    if (event.at("event") != "training") continue;
    ++points;
    EXPECT_EQ(event.at("split"), "measured") << line;
    EXPECT_GE(event.at("steps"), 5) << line;
    EXPECT_GT(event.at("rate").get<double>(), 0) << line;
    EXPECT_GT(event.at("compute_s").get<double>(), 0) << line;
    // 64 * 32 + 32 + 32 * 4 + 4 floats of gradients, once to the other host.
    if (event.at("hosts") == 2) {
      EXPECT_GE(event.at("wire_bytes").get<double>(), 4 * 2212) << line;
      EXPECT_LT(event.at("wire_bytes").get<double>(), 4 * 2212 + 2000) << line;
    }
  }
  EXPECT_EQ(points, 3);
  EXPECT_TRUE(verdict.starts_with("2 hosts with 2 processes train ")) << verdict;
  for (const char* text : {"samples/s", "speed-up", "efficiency", "1 x 2", "2 x 2", verdict.c_str()}) {
    EXPECT_NE(job.out().find(text), std::string::npos) << text << job.out();
  }
  EXPECT_TRUE(job.file("t.svg").starts_with("<svg "));
}

TEST(BenchTraining, ACommandOfTheUsers) {
  Job job({{"bench", "training", "--processes", "1,2", "--repetitions", "2", "--", "sh", "-c", "test $WORLD_SIZE -le 2",
            "-np"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.out().find("runs/s"), std::string::npos) << job.out();
  const Finished failing =
      run({{"bench", "training", "--processes", "2", "--", "sh", "-c", "echo because >&2; exit 3"}});
  EXPECT_EQ(failing.status, 1);
  EXPECT_NE(failing.err.find("exit code 3"), std::string::npos) << failing.err;
  EXPECT_NE(failing.err.find("because"), std::string::npos) << failing.err;
}

TEST(BenchTraining, SaysWhatIsWrongWithItsOptions) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"--processes", "0"}, "--processes '0'"},
      {{"--processes", "1,x"}, "--processes '1,x'"},
      {{"--hosts", "2"}, "there is 1"},
      {{"-H", "a,b", "--hosts", "2", "--processes", "1"}, "a process for each host"},
      {{"--layers", "10"}, "--layers '10'"},
      {{"--layers", "10,0,2"}, "--layers"},
      {{"--batch", "1.5"}, "--batch 1.5"},
      {{"--global-batch", "8"}, "--global-batch"},
      {{"--json", "/nowhere/x", "--processes", "1"}, "/nowhere/x"},
  };
  for (const auto& [words, text] : cases) {
    std::vector<std::string> arguments = {"bench", "training"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const Finished finished = run({arguments});
    EXPECT_NE(finished.status, 0) << text;
    EXPECT_NE(finished.err.find(text), std::string::npos) << finished.err;
  }
}

TEST(BenchTraining, NothingIsLeftWhenItIsKilled) {
  for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
    Job job({{"bench", "training", "--processes", "2", "--", "sh", "-c", "echo > started-$RANK; sleep 600"}});
    const auto temporary = [&job] {  // the harness's own, which every job has
      std::vector<std::string> found;
      for (const auto& entry : std::filesystem::directory_iterator(job.folder() + "/tmp"))
        found.push_back(entry.path());
      return found;
    };
    ASSERT_TRUE(eventually([&] { return !job.file("started-0").empty() && !job.file("started-1").empty(); }))
        << job.err();
    EXPECT_FALSE(temporary().empty());
    job.signal(signal);
    EXPECT_EQ(job.wait(), 128 + signal);
    EXPECT_TRUE(eventually([&] { return job.processes().empty(); }, 20s));
    EXPECT_TRUE(eventually([&] { return temporary().empty(); }, 5s)) << temporary().front();
  }
}

TEST(BenchTraining, WhatWasMeasuredOutlivesAJobThatFails) {
  const char* const program = "test $WORLD_SIZE -lt 3 || { echo because >&2; exit 3; }";
  Job job({{"bench", "training", "--processes", "1,2,3", "--repetitions", "2", "--json", "t.json", "--", "sh", "-c",
            program}});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_NE(job.err().find("exit code 3"), std::string::npos) << job.err();
  EXPECT_NE(job.out().find("1 x 1"), std::string::npos) << job.out();
  const auto lines = lines_of(job.file("t.json"));
  ASSERT_EQ(lines.size(), 3U) << job.err();
  EXPECT_EQ(nlohmann::json::parse(lines[1]).at("processes"), 2);
  EXPECT_EQ(nlohmann::json::parse(lines.back()).at("event"), "failure");
  // Nothing was measured: a file that is there stays.
  Job late({{"bench", "training", "--processes", "1", "--timeout", "0.2", "--json", "t.json", "--", "sh", "-c",
             "echo kept > t.json; sleep 600"}});
  EXPECT_EQ(late.wait(), 1);
  EXPECT_EQ(late.file("t.json"), "kept\n");
  EXPECT_NE(late.err().find("give it longer (--timeout S, now 0.2)"), std::string::npos) << late.err();
}

TEST(BenchTraining, VariablesOfTheCommandSayWhereAndNothingElse) {
  Job job({.arguments = {"bench", "training", "--processes", "2", "--repetitions", "1", "--json", "t.json", "--", "sh",
                         "-c", "test -z \"$(env | grep ^COHORT_RUN_ | grep -v ^COHORT_RUN_DIR=)\" || exit 4; exit 0"},
           .environment = {"COHORT_RUN_HOSTS=a:1,b:1", "COHORT_RUN_STARTER=local", "COHORT_RUN_NP=7",
                           "COHORT_RUN_MAX_RESTARTS=5", "COHORT_RUN_TIMEOUT=0.001", "COHORT_RUN_RUN_DIR=elsewhere",
                           "COHORT_RUN_CONFIG=/nowhere/x.toml"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  std::vector<int> hosts;
  for (const std::string& line : lines_of(job.file("t.json"))) {
    const auto event = nlohmann::json::parse(line);
    if (event.at("event") == "training") hosts.push_back(event.at("hosts"));
  }
  EXPECT_EQ(hosts, (std::vector<int>{1, 2}));
}

// Over the driver and the NCCL that pretend: 4 GPUs, and ranks that have one each or share one.
const std::vector<std::string> kOnGpus = {"LD_LIBRARY_PATH=" COHORT_FAKE};

TEST(BenchOnGpus, MeasuresAndChecksBothWaysOfSumming) {
  for (const std::string sums : {"fast", "exact"}) {
    Job job({.arguments = {"bench", "all", "-np", "1,2,4", "--device", "cuda", "--gpu-sums", sums, "--sizes",
                           "1000,64K", "-n", "3", "-w", "1", "--json", "rows.json"},
             .environment = kOnGpus});
    ASSERT_EQ(job.wait(), 0) << job.err();
    for (const std::string& text : {std::string("busbw"), std::string("CUDA 12.4, 4 GPUs; NCCL 2."),
                                    std::string("cuda memory, hot"), "sums: " + sums})
      EXPECT_NE(job.out().find(text), std::string::npos) << text << job.out();
    EXPECT_EQ(job.out().find("share"), std::string::npos) << job.out();
    int rows = 0, ranks = 0;
    for (const std::string& line : lines_of(job.file("rows.json"))) {
      const auto event = nlohmann::json::parse(line);
      if (event.at("event") == "world") {
        ranks = event.at("ranks");
        EXPECT_EQ(event.at("gpus"), ranks) << line;
        EXPECT_EQ(event.at("gpu_sums"), sums) << line;
      }
      if (event.at("event") != "row" || event.at("collective") == "barrier") continue;
      ++rows;
      EXPECT_EQ(event.at("memory"), "cuda") << line;
      for (const char* side : {"out_of_place", "in_place"}) {
        if (!event.contains(side)) continue;
        EXPECT_EQ(event[side].at("wrong"), 0) << line;
        if (event.at("collective") == "all_reduce") {
          EXPECT_NEAR(event[side].at("busbw_GBps").get<double>(),
                      event[side].at("algbw_GBps").get<double>() * 2 * (ranks - 1) / ranks, 1e-9)
              << line;
        }
      }
    }
    EXPECT_EQ(rows, (11 + 13 + 13) * 2);  // a pair is wanted for two of them
  }
}

TEST(BenchOnGpus, RanksThatShareAGpuAreTold) {
  Job job({.arguments = {"bench", "-np", "5", "--threads", "--device", "cuda", "--sizes", "1000", "-n", "3"},
           .environment = kOnGpus});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.out().find("5 ranks share 1 GPU"), std::string::npos) << job.out();
}

TEST(BenchOnGpus, SaysWhatIsMissingAndWhatDoesNotGoTogether) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"--device", "tpu"}, "--device 'tpu': choose from cpu, cuda"},
      {{"--gpu-sums", "fast"}, "add --device cuda"},
      {{"--device", "cuda", "--gpu-sums", "quick"}, "--gpu-sums 'quick': choose from fast, exact"},
      {{"--device", "cuda", "--memory", "heap"}, "--memory heap"},
      {{"--device", "cuda", "--state", "cold"}, "--state cold"},
      {{"--device", "cuda", "--sizes", "8"}, "but this process sees no GPU"},
  };
  for (const auto& [words, text] : cases) {
    std::vector<std::string> arguments = {"bench"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    std::vector<std::string> environment = kOnGpus;
    environment.emplace_back("FAKE_CUDA_GPUS=0");
    const Finished finished = run({.arguments = arguments, .environment = environment});
    EXPECT_NE(finished.status, 0) << text;
    EXPECT_NE(finished.err.find(text), std::string::npos) << finished.err;
  }
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
