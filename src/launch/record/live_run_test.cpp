#include "launch/record/live_run.h"
#include "launch/record/live_file.h"
#include "launch/show/last_line.h"

#include <gtest/gtest.h>

#include <fcntl.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace cohort::launch {
namespace {

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
  const RunFolder folder{name, name, sys::UniqueFd(::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), {}};
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
