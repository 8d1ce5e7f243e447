#include "launch/output/live_run.h"
#include "launch/output/text.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;
using Clock = Figures::Clock;

TEST(LiveRun, AGpuWhoseDriverTellsNothingIsNotIdle) {
  LiveRun run;
  run.hosts = {{"a", 0, 1}, {"b", 1, 1}};
  const std::map<std::string, std::vector<GpuUse>> gpus = {{"a", {{50, 4096}, {}}}, {"b", {{-1, 1024}}}};
  for (LiveHost& host : run.hosts) describe_gpus(gpus.at(host.name), host);
  EXPECT_EQ(run.hosts[0].gpus, 2);
  EXPECT_EQ(run.hosts[0].gpu, 0.5);
  EXPECT_EQ(run.hosts[0].gpu_memory, 4096);
  EXPECT_EQ(run.hosts[1].gpu, -1);
  EXPECT_EQ(run.hosts[1].gpu_memory, 1024);
  const auto values = nlohmann::json::parse(usage_line(run, gpus)).at("values");
  EXPECT_EQ(values.at("system/a/gpu0"), 0.5);
  EXPECT_EQ(values.at("system/b/gpu0_memory"), 1024);
  for (const char* const name : {"system/a/gpu1", "system/a/gpu1_memory", "system/b/gpu0"})
    EXPECT_FALSE(values.contains(name)) << name;
}

RankReport at(int rank, std::int64_t step, std::uint64_t waited_ms, std::uint64_t exposed_ms = 0) {
  RankReport report;
  report.rank = rank;
  report.has_page = true;
  report.state = 'R';
  report.step = step;
  report.samples = static_cast<std::int64_t>(static_cast<std::uint64_t>(step) * 32);
  report.exposed_ns = exposed_ms * 1'000'000;
  report.memory = 1 << 20;
  GroupReport group;
  group.id = 1;
  group.begun = group.ended = static_cast<std::uint64_t>(step);
  group.operation = "barrier()";
  group.waited_ns = waited_ms * 1'000'000;
  report.groups = {group};
  return report;
}

TEST(Figures, TheLateRankIsTheOneThatTheOthersWaitFor) {
  Figures figures(4);
  // Ten steps a second; ranks 0, 1 and 3 wait 40 ms of each for rank 2.
  for (int tick = 0; tick <= 50; ++tick) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto step = static_cast<std::uint64_t>(tick) * 4;
      figures.report(at(rank, static_cast<std::int64_t>(step), rank == 2 ? step : step * 40, rank == 2 ? 0 : step * 50),
                     Clock::time_point(tick * 400ms));
    }
  }
  const auto all = figures.look(Clock::time_point(50 * 400ms));
  ASSERT_EQ(all.size(), 4U);
  EXPECT_NEAR(all[2].waited_for, 0.39, 0.01);
  for (const int rank : {0, 1, 3}) {
    EXPECT_NEAR(all[static_cast<std::size_t>(rank)].waited, 0.4, 0.01);
    EXPECT_NEAR(all[static_cast<std::size_t>(rank)].exposed, 0.5, 0.01);
    EXPECT_EQ(all[static_cast<std::size_t>(rank)].waited_for, 0);
  }
  EXPECT_NEAR(all[0].steps_per_second, 10, 0.01);
  EXPECT_NEAR(all[0].samples_per_second, 320, 0.3);
  EXPECT_EQ(all[0].step, 200);
  EXPECT_EQ(all[0].samples, 6400);
  EXPECT_EQ(all[0].state, "running");
  EXPECT_EQ(all[0].memory, 1U << 20);
}

TEST(Figures, OfTwoRanksAsWell) {
  Figures figures(2);
  for (int second = 0; second <= 12; ++second) {
    figures.report(at(0, second, static_cast<std::uint64_t>(second) * 500), Clock::time_point(second * 1s));
    figures.report(at(1, second, 0), Clock::time_point(second * 1s));
  }
  const auto all = figures.look(Clock::time_point(12s));
  EXPECT_NEAR(all[1].waited_for, 0.5, 0.01);
  EXPECT_EQ(all[0].waited_for, 0);
}

TEST(Figures, AWaitThatHasNotEndedCounts) {
  Figures figures(2);
  RankReport waiting = at(0, 3, 0);
  waiting.groups[0].begun = 4;
  waiting.groups[0].waiting = true;
  for (int second = 0; second <= 20; ++second) {
    figures.report(waiting, Clock::time_point(second * 1s));
    figures.report(at(1, 3, 0), Clock::time_point(second * 1s));
  }
  const auto all = figures.look(Clock::time_point(20s));
  EXPECT_EQ(all[0].state, "waiting");
  EXPECT_NE(all[0].doing.find("waiting in barrier()"), std::string::npos);
  EXPECT_NEAR(all[0].waited, 1, 0.01);
  EXPECT_NEAR(all[0].exposed, 1, 0.01);
  EXPECT_NEAR(all[1].waited_for, 1, 0.01);
  EXPECT_EQ(all[0].steps_per_second, 0);
}

TEST(Figures, StepsThatAreSlowerThanTheWindowHaveARateAndAHaltHasNone) {
  Figures figures(1);
  for (int second = 0; second <= 90; ++second) figures.report(at(0, second / 15, 0), Clock::time_point(second * 1s));
  EXPECT_NEAR(figures.look(Clock::time_point(90s))[0].steps_per_second, 1 / 15.0, 0.001);
  EXPECT_EQ(figures.look(Clock::time_point(200s))[0].steps_per_second, 0);
}

TEST(Figures, HowRanksEndStays) {
  Figures figures(3);
  figures.report(at(0, 5, 0), Clock::time_point(1s));
  figures.ended(0, true, "exit status 0");
  figures.ended(1, false, "SIGKILL");
  figures.report(at(0, 7, 0), Clock::time_point(2s));  // a report made before its end, which arrives after it
  const auto all = figures.look(Clock::time_point(3s));
  EXPECT_EQ(all[0].state, "ended");
  EXPECT_EQ(all[0].step, 5);
  EXPECT_EQ(all[1].state, "failed");
  EXPECT_EQ(all[1].doing, "SIGKILL");
  EXPECT_EQ(all[2].state, "starting");
}

TEST(Figures, WhateverARankWritesTheyAreNumbers) {
  Figures figures(2);
  RankReport wild = at(1, std::numeric_limits<std::int64_t>::min(), 0);
  wild.samples = std::numeric_limits<std::int64_t>::max();
  wild.groups[0].waited_ns = std::numeric_limits<std::uint64_t>::max();
  wild.exposed_ns = std::numeric_limits<std::uint64_t>::max();
  wild.rank = 1;
  figures.report(at(1, 4, 10), Clock::time_point(0s));
  figures.report(wild, Clock::time_point(1s));
  figures.report(at(1, std::numeric_limits<std::int64_t>::max(), 0), Clock::time_point(2s));
  wild.rank = 7;
  figures.report(wild, Clock::time_point(2s));
  for (const RankFigures& one : figures.look(Clock::time_point(3s))) {
    EXPECT_GE(one.step, 0);
    EXPECT_GE(one.samples, 0);
    EXPECT_GE(one.steps_per_second, 0);
    EXPECT_LE(one.waited, 1);
    EXPECT_LE(one.exposed, 1);
  }
}

LiveRun a_run() {
  LiveRun run;
  run.time = 1795251453.125;
  run.job = "train-0a1b";
  run.program = "train";
  run.state = "running";
  run.start = 1795251400;
  run.restarts = 2;
  run.logs = "/runs/a/logs";
  run.hosts = {{"a", 0, 1}, {"b", 1, 1}};
  run.notices = {{1795251450, "rank 1 is \"slow\""}};
  run.ranks.resize(2);
  run.ranks[0].figures = {"running", "in barrier()", 12, 384, 3.125, 100, 0.25, 0.125, 0, 1u << 30};
  run.ranks[0].line = "loss 0.3 \xff";
  run.ranks[1].figures.waited_for = 0.5;
  return run;
}

TEST(LiveRun, IsReadBack) {
  const auto read = parse_live_run(to_json(a_run()));
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_EQ(read->time, 1795251453.125);
  EXPECT_EQ(read->state, "running");
  EXPECT_EQ(read->restarts, 2);
  EXPECT_FALSE(read->exit_status);
  ASSERT_EQ(read->hosts.size(), 2U);
  EXPECT_EQ(read->hosts[1].first_rank, 1);
  ASSERT_EQ(read->notices.size(), 1U);
  EXPECT_EQ(read->notices[0].text, "rank 1 is \"slow\"");
  ASSERT_EQ(read->ranks.size(), 2U);
  const RankFigures& first = read->ranks[0].figures;
  EXPECT_EQ(first.state, "running");
  EXPECT_EQ(first.doing, "in barrier()");
  EXPECT_EQ(first.step, 12);
  EXPECT_EQ(first.samples, 384);
  EXPECT_EQ(first.steps_per_second, 3.125);
  EXPECT_EQ(first.exposed, 0.25);
  EXPECT_EQ(first.memory, 1u << 30);
  EXPECT_EQ(read->ranks[0].line, "loss 0.3 \xef\xbf\xbd");  // what is no UTF-8 is marked
  EXPECT_EQ(read->ranks[1].figures.waited_for, 0.5);
}

TEST(LiveRun, OtherBuildsAndDamagedOnes) {
  EXPECT_FALSE(parse_live_run(""));
  EXPECT_FALSE(parse_live_run("[1]"));
  EXPECT_FALSE(parse_live_run(R"({"schema":2})"));
  EXPECT_FALSE(parse_live_run(to_json(a_run()).substr(0, 300)));
  const auto read = parse_live_run(
      R"({"schema":1,"more":{"a":[]},"exit_status":-3,"columns":["new","step","line",7],"ranks":[[true,5],[1,2.5,"x"],3,[]],)"
      R"("hosts":[4,{"name":7,"ranks":99999999999}],"time":"late"})");
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_EQ(read->exit_status, -3);
  ASSERT_EQ(read->ranks.size(), 3U);
  EXPECT_EQ(read->ranks[0].figures.step, 5);
  EXPECT_EQ(read->ranks[1].figures.step, 0);
  EXPECT_EQ(read->ranks[1].line, "x");
  EXPECT_EQ(read->hosts.size(), 1U);
  EXPECT_EQ(read->time, 0);
  std::string deep = R"({"schema":1,"a":)";
  for (int i = 0; i < 200'000; ++i) deep += '[';
  EXPECT_FALSE(parse_live_run(deep));
}

TEST(LiveFile, TheLastOneIsThereInTheEnd) {
  std::string name = (std::filesystem::temp_directory_path() / "live-file-XXXXXX").string();
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const RunFolder folder{name, name, sys::UniqueFd(::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), {}, {}};
  const auto read = [&] {
    std::ifstream file(name + "/live.json");
    return parse_live_run(std::string(std::istreambuf_iterator<char>(file), {}));
  };
  {
    LiveFile file(folder);
    EXPECT_TRUE(file.due());
    file.write(a_run());
    EXPECT_FALSE(file.due());
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!read() && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_TRUE(read());
    LiveRun last = a_run();
    last.state = "ended";
    last.exit_status = 0;
    file.write(last);
  }
  const auto left = read();
  ASSERT_TRUE(left);
  EXPECT_EQ(left->state, "ended");
  EXPECT_EQ(left->exit_status, 0);
  EXPECT_EQ(std::filesystem::status(name + "/live.json").permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  std::filesystem::remove_all(name);
  LiveFile gone(folder);
  gone.write(a_run());
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::optional<std::string> why;
  while (!(why = gone.complaint()) && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_TRUE(why);
  EXPECT_NE(why->find("live.json"), std::string::npos);
  EXPECT_FALSE(gone.complaint());
}

TEST(LastLine, IsTheLastThatSaysSomething) {
  LastLine line;
  line.append(Stream::Stdout, "one\ntwo\n\n");
  EXPECT_EQ(line.text(), "two");
  line.append(Stream::Stdout, "thr");
  EXPECT_EQ(line.text(), "thr");
  line.append(Stream::Stderr, "warned\n");
  EXPECT_EQ(line.text(), "warned");
  line.append(Stream::Stdout, "ee\r\n");
  EXPECT_EQ(line.text(), "three");
  line.append(Stream::Stderr, "\r 10%|#   |\r 20%|##  |");
  EXPECT_EQ(line.text(), " 20%|##  |");
  line.append(Stream::Stdout, "\033[31mred\033[0m\tand \a\n");
  EXPECT_EQ(line.text(), "red and");
  line.append(Stream::Stdout, std::string(100'000, 'x') + "\nend\n");
  EXPECT_EQ(line.text(), "end");
  line.append(Stream::Stdout, std::string(100'000, 'y'));
  EXPECT_EQ(line.text(), std::string(LastLine::kLongest, 'y'));
}

}  // namespace
}  // namespace cohort::launch
