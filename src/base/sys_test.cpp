#include "base/files.h"
#include "base/hardware.h"
#include "base/thread.h"
#include "base/unique_fd.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace cohort::sys {
namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1; }

TEST(UniqueFd, ClosesAtTheEndAndMovesOnce) {
  const int raw = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(raw, 0);
  {
    UniqueFd first(raw);
    UniqueFd second(std::move(first));
    EXPECT_EQ(second.get(), raw);
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

TEST(Thread, TakesNoSignalsAndLeavesItsStartersMaskAlone) {
  sigset_t inside;
  sigset_t before;
  sigset_t after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  start_without_signals([&] { ::pthread_sigmask(SIG_SETMASK, nullptr, &inside); }).join();
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) {
    EXPECT_EQ(sigismember(&inside, number), 1) << number;
    EXPECT_EQ(sigismember(&after, number), sigismember(&before, number)) << number;
  }
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) EXPECT_EQ(sigismember(&inside, fault), 0) << fault;
}

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

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "cohort_files_XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { ASSERT_TRUE(remove_tree(folder_)); }
  std::string at(const std::string& name) const { return folder_ + "/" + name; }
  std::string folder_;
};

mode_t mode_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 07777 : 0;
}

TEST_F(Files, ReplacesAsAWholeAndKeepsTheMode) {
  ASSERT_TRUE(write_file_atomically(at("a"), "one"));
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(mode_of(at("a")), 0666 & ~mask);
  ASSERT_EQ(::chmod(at("a").c_str(), 0640), 0);
  ASSERT_TRUE(write_file_atomically(at("a"), "two"));
  EXPECT_EQ(mode_of(at("a")), mode_t{0640});
  EXPECT_EQ(read_file(at("a"))->text(), "two");
  EXPECT_EQ(*list_folder(folder_), std::vector<std::string>{"a"});
}

TEST_F(Files, FollowsALink) {
  ASSERT_TRUE(write_file_atomically(at("target"), "one"));
  ASSERT_EQ(::symlink("target", at("link").c_str()), 0);
  ASSERT_TRUE(write_file_atomically(at("link"), "two"));
  EXPECT_EQ(read_file(at("target"))->text(), "two");
  struct stat status {};
  ASSERT_EQ(::lstat(at("link").c_str(), &status), 0);
  EXPECT_TRUE(S_ISLNK(status.st_mode));
}

TEST_F(Files, LeavesEverythingAsItWasWhenNotCommitted) {
  ASSERT_TRUE(write_file_atomically(at("a"), "one"));
  {
    auto file = AtomicFile::create(at("a"));
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->writer().write("two"));
  }
  EXPECT_EQ(read_file(at("a"))->text(), "one");
  EXPECT_EQ(*list_folder(folder_), std::vector<std::string>{"a"});
}

TEST_F(Files, ReadsWhatTellsNoSize) {
  EXPECT_TRUE(read_text("/proc/self/status")->starts_with("Name:"));
  ASSERT_TRUE(write_file_atomically(at("a"), std::string(10000, 'x')));
  EXPECT_EQ(read_text(at("a")), std::string(10000, 'x'));
  EXPECT_EQ(read_text(at("none")).error().code(), ErrorCode::Unavailable);
  // The path can be opened, but reads fail, as for a file in /proc whose process ends in between.
  EXPECT_EQ(read_text(folder_).error().code(), ErrorCode::Io);
}

TEST_F(Files, SaysWhatFailed) {
  EXPECT_EQ(read_file(at("none")).error().code(), ErrorCode::Unavailable);
  EXPECT_NE(std::string(read_file(folder_).error().what()).find("a folder"), std::string::npos);
  EXPECT_EQ(read_file("/dev/zero").error().code(), ErrorCode::Io);
  EXPECT_NE(std::string(write_file_atomically(at("no/a"), "x").error().what()).find("ENOENT"), std::string::npos);
  EXPECT_NE(std::string(write_file_atomically(folder_, "x").error().what()).find("EISDIR"), std::string::npos);
  ASSERT_TRUE(write_file_atomically(at("a"), "12345"));
  EXPECT_EQ(read_file(at("a"), {.max_bytes = 4}).error().code(), ErrorCode::Corrupt);
  EXPECT_NE(std::string(make_folders(at("a/b")).error().what()).find("ENOTDIR"), std::string::npos);
  EXPECT_NE(std::string(make_folders(at("a")).error().what()).find("ENOTDIR"), std::string::npos);
}

TEST_F(Files, KeepsTheOldContentWhenThereIsNoRoom) {
  ASSERT_TRUE(write_file_atomically(at("a"), "one"));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit { 100, 100 };
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto written = write_file_atomically(at("a"), std::string(1000, 'x'));
    ::_exit(!written && written.error().code() == ErrorCode::Io ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_file(at("a"))->text(), "one");
  EXPECT_EQ(*list_folder(folder_), std::vector<std::string>{"a"});
}

TEST_F(Files, MakesAndRemovesFolders) {
  ASSERT_TRUE(make_folders(at("x/y/z/")));
  ASSERT_TRUE(make_folders(at("x/y/z")));
  ASSERT_TRUE(write_file_atomically(at("x/y/z/file"), ""));
  EXPECT_EQ(read_file(at("x/y/z/file"))->size(), 0u);
  ASSERT_TRUE(remove_tree(at("x")));
  ASSERT_TRUE(remove_tree(at("x")));
  EXPECT_TRUE(list_folder(folder_)->empty());
}

}  // namespace
}  // namespace cohort::sys
