#include "launch/output/other_hosts.h"
#include "launch/output/run_folder.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kNobody = 65534;

std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The current folder is one that everybody may write to, like /tmp; beside it is a file that must not be touched.
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
  ASSERT_EQ(::chmod("runs", 01777), 0);  // like /tmp, which may contain a run's folder but not be one
  EXPECT_TRUE(make());
  const auto refused = make("runs");
  ASSERT_FALSE(refused);
  EXPECT_NE(std::string(refused.error().what()).find("name a new folder in it"), std::string::npos);
  EXPECT_FALSE(fs::exists("runs/" + std::string(kLockFile)));
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

TEST_F(RunFolderTest, IsOneJobsAndNobodyElseCanLockIt) {
  const auto folder = make("run");
  ASSERT_TRUE(folder) << folder.error().what();
  EXPECT_EQ(mode(folder->path + "/.lock"), 0600U);
  const auto second = make("run");
  ASSERT_FALSE(second);
  EXPECT_NE(std::string(second.error().what()).find("another job is running in it"), std::string::npos);

  ASSERT_TRUE(make("free"));  // whoever may read the folder may lock the folder itself, and nothing in it
  const sys::UniqueFd foreign(::open("free", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(foreign.get(), LOCK_EX | LOCK_NB), 0);
  EXPECT_TRUE(make("free"));
  if (::getuid() == 0) as_nobody([] { return ::open("free/.lock", O_RDONLY | O_CLOEXEC) < 0; });
}

TEST(WarningsFile, KeepsWholeLinesAndLooksAtTheDisk) {
  std::string name = (std::filesystem::temp_directory_path() / "cohort-warnings-XXXXXX").string();
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const auto folder = make_run_folder({.path = name, .program_name = "p", .id = "1"});
  ASSERT_TRUE(folder.has_value());
  for (const char* line : {"{\"a\":1}\n", "{\"a\":2}\n"}) {  // like two jobs in the same folder
    WarningsFile file(*folder);
    file.append("warnings.jsonl", line);
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
    RemoteLogs keeper(logs, {4, 1, true});
    keeper.open({2, 3, 4, 5});
    keeper.keep({2, Stream::Stdout, "one "});
    keeper.keep({2, Stream::Stdout, std::string("t\0o\n", 4)});
    keeper.keep({2, Stream::Stderr, "why\n"});
    keeper.close(2);
    keeper.keep({2, Stream::Stderr, "and late\n"});
    troubles = keeper.take_troubles();
  }
  EXPECT_EQ(read(logs + "/rank-2.out"), std::string("one t\0o\n", 8));
  EXPECT_EQ(read(logs + "/rank-2.err"), "why\nand late\n");
  EXPECT_TRUE(std::filesystem::exists(logs + "/rank-3.out"));  // it has printed nothing
  EXPECT_TRUE(std::filesystem::exists(logs + "/server-0.err"));
  EXPECT_TRUE(std::filesystem::exists(logs + "/evaluator.out"));
  EXPECT_TRUE(troubles.empty());
  std::filesystem::remove_all(folder);
}

TEST(RemoteLogs, OfProcessesThatHaveEndedAreClosed) {
  char folder[] = "/tmp/cohort-remote-logs-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = descriptors();
  RemoteLogs keeper(folder, {40, 0, false});
  for (int rank = 0; rank < 40; ++rank) {
    keeper.open({rank});
    keeper.close(rank);
  }
  EXPECT_EQ(descriptors(), before);
  std::filesystem::remove_all(folder);
}

TEST(TracePieces, OfAHostWhoseAgentHasGoneAreContinued) {
  char folder[] = "/tmp/cohort-trace-pieces-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const status::HostTrace host{1, "h1"};
  const auto text = [&](bool closed) {
    TracePieces pieces(folder);
    pieces.keep(host, 5, "one");
    if (closed) pieces.close(1);
    pieces.keep(host, 5, "two");
    pieces.close(7);  // it has sent nothing
    EXPECT_TRUE(pieces.take_troubles().empty());
    return read(std::string(folder) + "/trace/host-1.json");
  };
  EXPECT_TRUE(text(true).ends_with("onetwo"));
  EXPECT_EQ(text(true), text(false));
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
  RemoteLogs keeper(folder, {4, 0, false});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  for (int i = 0; i < 3; ++i) {
    keeper.keep({0, Stream::Stdout, "x"});
    keeper.keep({1, Stream::Stdout, "xxx"});
    keeper.keep({2, Stream::Stdout, "x"});
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  const std::vector<std::string> troubles = keeper.take_troubles();
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
    RemoteLogs keeper(folder, {4, 0, false});
    for (int rank = 0; rank < 2; ++rank) keeper.keep({rank, Stream::Stdout, "x"});
    troubles = keeper.take_troubles();
  }
  EXPECT_TRUE(troubles.empty()) << troubles.front();
  EXPECT_EQ(read(kept), "dear");
  for (const char* name : {"/rank-0.out", "/rank-1.out"}) EXPECT_EQ(read(std::string(folder) + name), "x") << name;
  std::filesystem::remove_all(folder);
}

/// Acts like a machine that has run for a day, so that no clock is negative, even one that is hours behind.
std::int64_t now_ns() {
  return (std::chrono::hours(24) + std::chrono::steady_clock::now().time_since_epoch()) / std::chrono::nanoseconds(1);
}

/// A real connection to a host whose clock is ahead by `ahead_ns`.
ClockOffset measure_over_a_connection(std::int64_t ahead_ns) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) std::abort();
  std::thread there([fd = ends[1], ahead_ns] {
    std::uint64_t number = 0;
    while (::recv(fd, &number, sizeof number, 0) == sizeof number) {
      const std::int64_t answer[2] = {static_cast<std::int64_t>(number), now_ns() + ahead_ns};
      if (::send(fd, answer, sizeof answer, 0) != sizeof answer) break;
    }
  });
  ClockSync sync;
  ClockSync::Next next = sync.begin(now_ns());
  while (next.ask) {
    EXPECT_EQ(::send(ends[0], &*next.ask, 8, 0), 8);
    std::int64_t answer[2];
    if (::recv(ends[0], answer, sizeof answer, 0) != sizeof answer) break;
    next = sync.answer(static_cast<std::uint64_t>(answer[0]), answer[1], now_ns());
  }
  ::shutdown(ends[0], SHUT_RDWR);
  there.join();
  ::close(ends[0]);
  ::close(ends[1]);
  return next.found.value_or(ClockOffset{0, INT64_MAX, 0});
}

TEST(ClockSyncTest, AShiftedClockIsFoundWithinTheUncertaintyThatIsStated) {
  for (const std::int64_t ahead :
       {std::int64_t{0}, std::int64_t{11'560'000'000}, std::int64_t{-3'600'000'000'000}, std::int64_t{17}}) {
    const ClockOffset found = measure_over_a_connection(ahead);
    EXPECT_LE(std::llabs(found.offset_ns - ahead), found.uncertainty_ns) << ahead;
    EXPECT_LT(found.uncertainty_ns, 50'000'000) << "16 messages there and back, and none within 100 ms";
  }
}

TEST(ClockSyncTest, TheWayThatTakesLongerOneWayIsWithinTheUncertainty) {
  // Time passes only where the test says so.
  std::mt19937 random(7);
  for (int trial = 0; trial < 1000; ++trial) {
    std::int64_t here = 10'000'000'000'000;  // no clock says less than 0
    const std::int64_t ahead = std::int64_t{static_cast<std::int32_t>(random())} * 1000;
    ClockSync sync;
    ClockSync::Next next = sync.begin(here);
    std::uint64_t asked = 0;
    EXPECT_FALSE(sync.begin(here).ask) << "one round at a time";
    while (!next.found) {
      asked = next.ask.value_or(asked);
      here += static_cast<std::int64_t>(random() % 1'000'000);  // the way there takes longer
      const std::int64_t there = here + ahead;
      here += static_cast<std::int64_t>(random() % 1'000);  // the way back is fast
      EXPECT_FALSE(sync.answer(asked + 1, 5, here).found) << "not what was asked";
      next = sync.answer(asked, there, here);
    }
    const std::optional<ClockOffset> found = next.found;
    ASSERT_LE(std::llabs(found->offset_ns - ahead), found->uncertainty_ns);
    ASSERT_GE(asked, static_cast<std::uint64_t>(ClockSync::kQuestions));
    ASSERT_LE(asked, static_cast<std::uint64_t>(ClockSync::kMostQuestions));
    if (found->uncertainty_ns > ClockSync::kSoon) {
      ASSERT_EQ(asked, static_cast<std::uint64_t>(ClockSync::kMostQuestions));
    }
  }
}

TEST(ClockSyncTest, ARoundThatIsCutShortCounts) {
  ClockSync sync;
  EXPECT_FALSE(sync.end().found);
  sync.begin(100);
  sync.answer(1, 1105, 110);
  const auto found = sync.end().found;
  ASSERT_TRUE(found);
  EXPECT_FALSE(sync.end().found);
  EXPECT_EQ(found->offset_ns, 1000);
  EXPECT_EQ(found->uncertainty_ns, 5);
}

}  // namespace
}  // namespace cohort::launch
