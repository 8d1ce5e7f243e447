#include "launch/record/remote_logs.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

namespace cohort::launch {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(RemoteLogs, KeepEveryByteByRankAndStream) {
  char folder[] = "/tmp/cohort-remote-logs-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string logs = std::string(folder) + "/logs";
  std::vector<std::string> troubles;
  {
    RemoteLogs keeper(logs, {4, 1, true}, [&troubles](std::string text) { troubles.push_back(std::move(text)); });
    keeper.open({2, 3, 4, 5});
    keeper.keep({2, Stream::Stdout, "one "});
    keeper.keep({2, Stream::Stdout, std::string("t\0o\n", 4)});
    keeper.keep({2, Stream::Stderr, "why\n"});
  }
  EXPECT_EQ(read(logs + "/rank-2.out"), std::string("one t\0o\n", 8));
  EXPECT_EQ(read(logs + "/rank-2.err"), "why\n");
  EXPECT_TRUE(std::filesystem::exists(logs + "/rank-3.out"));  // it has printed nothing
  EXPECT_TRUE(std::filesystem::exists(logs + "/server-0.err"));
  EXPECT_TRUE(std::filesystem::exists(logs + "/evaluator.out"));
  EXPECT_TRUE(troubles.empty());
  std::filesystem::remove_all(folder);
}

TEST(RemoteLogs, OneThatCannotBeWrittenIsToldOnceAndTheOthersGoOn) {
  char folder[] = "/tmp/cohort-remote-logs-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  std::filesystem::create_directory(std::string(folder) + "/rank-0.out");  // a folder stands in its way
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4, before.rlim_max};
  std::vector<std::string> troubles;
  RemoteLogs keeper(folder, {4, 0, false}, [&troubles](std::string text) { troubles.push_back(std::move(text)); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  for (int i = 0; i < 3; ++i) {
    keeper.keep({0, Stream::Stdout, "x"});
    keeper.keep({1, Stream::Stdout, "xxx"});
    keeper.keep({2, Stream::Stdout, "x"});
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_DFL);
  ASSERT_EQ(troubles.size(), 2U);
  EXPECT_NE(troubles[0].find("rank-0.out"), std::string::npos) << troubles[0];
  EXPECT_NE(troubles[1].find("rank-1.out ends here, the job goes on"), std::string::npos) << troubles[1];
  EXPECT_EQ(read(std::string(folder) + "/rank-2.out"), "xxx");
  std::filesystem::remove_all(folder);
}

TEST(RemoteLogs, ALinkInTheirPlaceIsReplacedAndNotFollowed) {
  char folder[] = "/tmp/cohort-remote-logs-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string kept = std::string(folder) + "/kept";
  std::ofstream(kept) << "dear";
  std::filesystem::create_symlink(kept, std::string(folder) + "/rank-0.out");
  std::filesystem::create_hard_link(kept, std::string(folder) + "/rank-1.out");
  std::vector<std::string> troubles;
  {
    RemoteLogs keeper(folder, {4, 0, false}, [&troubles](std::string text) { troubles.push_back(std::move(text)); });
    for (int rank = 0; rank < 2; ++rank) keeper.keep({rank, Stream::Stdout, "x"});
  }
  EXPECT_TRUE(troubles.empty()) << troubles.front();
  EXPECT_EQ(read(kept), "dear");
  for (const char* name : {"/rank-0.out", "/rank-1.out"}) EXPECT_EQ(read(std::string(folder) + name), "x") << name;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace cohort::launch
