#include "launch/own_folder.h"

#include "launch/record/run_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kNobody = 65534;

std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The current folder is one that everybody may write to, as /tmp; beside it is a file that must not be touched.
class RunFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/cohort-run-folder-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    top_ = name;
    before_ = fs::current_path();
    fs::create_directory(top_ / "tmp");
    ASSERT_EQ(::chmod(top_.c_str(), 0755), 0);
    ASSERT_EQ(::chmod((top_ / "tmp").c_str(), 01777), 0);
    std::ofstream(top_ / "dear") << "dear";
    fs::current_path(top_ / "tmp");
  }
  void TearDown() override {
    fs::current_path(before_);
    fs::remove_all(top_);
  }
  static void as_nobody(const std::function<bool()>& what) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::setgid(kNobody) == 0 && ::setuid(kNobody) == 0 && what() ? 0 : 1);
    int word = 0;
    ASSERT_EQ(::waitpid(child, &word, 0), child);
    ASSERT_EQ(word, 0);
  }
  static Result<RunFolder> make(const std::string& path = {}) { return make_run_folder({path, "x", "1"}); }
  static mode_t mode(const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_mode & 07777;
  }

  fs::path top_;
  fs::path before_;
};

TEST_F(RunFolderTest, IsWrittenByThisUserAndTheRecordIsReadByNobodyElse) {
  const mode_t before = ::umask(0);
  const auto folder = make();
  ASSERT_TRUE(folder) << folder.error().what();
  ASSERT_TRUE(write_job_record(*folder, {{"a", 1}}));
  ::umask(before);
  EXPECT_EQ(mode("runs"), 0755U);
  EXPECT_EQ(mode(folder->path), 0755U);
  EXPECT_EQ(mode(folder->path + "/job.json"), 0600U);
  EXPECT_EQ(fs::read_symlink("runs/latest"), fs::path(folder->path).filename());
  ASSERT_TRUE(write_job_record(*folder, {{"a", 2}}));
  EXPECT_NE(read("runs/latest/job.json").find("2"), std::string::npos);
}

TEST_F(RunFolderTest, WhatIsPutInItsPlaceLaterGetsNothing) {
  const auto folder = make();
  ASSERT_TRUE(folder) << folder.error().what();
  fs::rename(folder->path, "runs/moved");
  fs::create_directory(folder->path);
  for (const char* name : {".job.json.new", "job.json"}) fs::create_symlink(top_ / "dear", folder->path + "/" + name);
  ASSERT_TRUE(write_job_record(*folder, {{"a", 1}}));
  EXPECT_EQ(read(top_ / "dear"), "dear");
  EXPECT_NE(read("runs/moved/job.json").find("1"), std::string::npos);
}

TEST_F(RunFolderTest, LinksInItAreReplacedAndNotFollowed) {
  fs::create_directory("own");
  fs::create_symlink(top_ / "dear", "own/.job.json.new");
  fs::create_symlink(top_ / "dear", "own/job.json");
  const auto folder = make("own");
  ASSERT_TRUE(folder) << folder.error().what();
  ASSERT_TRUE(write_job_record(*folder, {{"a", 1}}));
  EXPECT_EQ(read(top_ / "dear"), "dear");
  EXPECT_FALSE(fs::is_symlink("own/job.json"));
}

TEST_F(RunFolderTest, OneThatEverybodyMayWriteToIsRefused) {
  fs::create_directory("runs");
  ASSERT_EQ(::chmod("runs", 0777), 0);
  for (const char* path : {"", "runs", "runs/named"}) {
    const auto refused = make(path);
    ASSERT_FALSE(refused) << path;
    const std::string why = refused.error().what();
    EXPECT_NE(why.find("every user may write to it"), std::string::npos) << why;
    EXPECT_NE(why.find("--run-dir"), std::string::npos) << why;
  }
  ASSERT_EQ(::chmod("runs", 01777), 0);
  EXPECT_TRUE(make());
}

TEST_F(RunFolderTest, ALinkOfOnesOwnLeadsToAnotherDisk) {
  fs::create_directory(top_ / "scratch");
  fs::create_symlink(top_ / "scratch", "runs");
  EXPECT_TRUE(make());
  EXPECT_TRUE(fs::exists(top_ / "scratch/latest"));
}

TEST_F(RunFolderTest, AnotherUsersFolderIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  as_nobody([] { return ::umask(0) < 01000 && ::mkdir("runs", 0777) == 0 && ::mkdir("runs/mine", 0777) == 0; });
  for (const char* path : {"", "runs/named", "runs/mine", "runs"}) {
    const auto refused = make(path);
    ASSERT_FALSE(refused) << path;
    const std::string why = refused.error().what();
    EXPECT_NE(why.find("belongs to another user (uid 65534)"), std::string::npos) << why;
  }
  EXPECT_FALSE(fs::exists("runs/named"));
}

TEST_F(RunFolderTest, AnotherUsersLinkIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  fs::create_directory(top_ / "private");
  const std::string to = (top_ / "private").string();
  as_nobody([&to] { return ::symlink(to.c_str(), "runs") == 0; });
  for (const char* path : {"", "runs/named", "runs"}) {
    const auto refused = make(path);
    ASSERT_FALSE(refused) << path;
    const std::string why = refused.error().what();
    EXPECT_NE(why.find("link of another user"), std::string::npos) << why;
  }
  EXPECT_TRUE(fs::is_empty(top_ / "private"));
  EXPECT_FALSE(open_folder("runs"));
}

}  // namespace
}  // namespace cohort::launch
