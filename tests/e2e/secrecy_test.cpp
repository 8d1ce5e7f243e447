// The secret of a job is in no command line, environment, file, log, record or core dump of any of its processes. The
// test learns it as only this user may: from the memory file that a rank inherits.
#include "launch_harness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBytes = 32;

/// The secret and its digits.
struct Wanted {
  std::string bytes, digits;
  bool is_in(std::string_view text) const {
    return text.find(bytes) != std::string_view::npos || text.find(digits) != std::string_view::npos;
  }
};

std::string proc(pid_t pid, const std::string& name) { return "/proc/" + std::to_string(pid) + "/" + name; }

Wanted secret_of(pid_t rank) {
  Wanted wanted;
  for (const auto& each : fs::directory_iterator(proc(rank, "fd"))) {
    std::error_code error;
    if (!fs::read_symlink(each.path(), error).string().starts_with("/memfd:cohort-secret")) continue;
    wanted.bytes = read_text(each.path());
  }
  constexpr char kHex[] = "0123456789abcdef";
  for (const char byte : wanted.bytes) {
    wanted.digits += kHex[static_cast<unsigned char>(byte) >> 4];
    wanted.digits += kHex[static_cast<unsigned char>(byte) & 15];
  }
  return wanted;
}

struct Region {
  std::uintptr_t begin = 0, end = 0;
  bool left_out = false;  ///< of a core dump
};

std::vector<Region> regions_of(pid_t pid) {
  std::vector<Region> regions;
  std::istringstream maps(read_text(proc(pid, "smaps")));
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    Region region;
    char dash = 0;
    std::string rights;
    if (line.find('-') < 17 && words >> std::hex >> region.begin >> dash >> region.end >> rights && dash == '-') {
      region.left_out = rights.front() != 'r';
      regions.push_back(region);
    } else if (line.starts_with("VmFlags:") && !regions.empty()) {
      if (line.find(" dd") != std::string::npos || line.find(" io") != std::string::npos)
        regions.back().left_out = true;
    }
  }
  return regions;
}

/// All that a core dump of the process could hold, a region at a time: whether the secret is there. `hidden`: whether
/// it is in what a dump leaves out.
bool memory_shows(pid_t pid, const Wanted& wanted, bool& hidden) {
  const sys::UniqueFd memory(::open(proc(pid, "mem").c_str(), O_RDONLY | O_CLOEXEC));
  bool shown = false;
  std::string bytes;
  for (const Region& region : regions_of(pid)) {
    constexpr std::uintptr_t kPiece = 1 << 20;
    for (std::uintptr_t at = region.begin; at < region.end; at += kPiece) {
      // With an overlap, for what lies across two pieces.
      bytes.resize(std::min<std::uintptr_t>(kPiece + 2 * kBytes, region.end - at));
      const ssize_t got = ::pread(memory.get(), bytes.data(), bytes.size(), static_cast<off_t>(at));
      if (got <= 0) break;
      bytes.resize(static_cast<std::size_t>(got));
      if (wanted.is_in(bytes)) (region.left_out ? hidden : shown) = true;
    }
  }
  return shown;
}

/// A job of two ranks that stay in their world until the test has looked.
class Secrecy : public testing::Test {
 protected:
  void start() {
    JobOptions options;
    options.arguments = {"run", "-np", "2", "--run-dir", "kept", HEALTH_PEER, "away"};
    options.environment = {"COHORT_LOG=debug"};
    options.shell_before = "ulimit -c unlimited";
    job_ = std::make_unique<Job>(options);
    ASSERT_TRUE(eventually([&] { return count(job_->out(), "is in") == 2; })) << job_->out() << job_->err();
    ranks_ = job_->processes(HEALTH_PEER);
    ASSERT_EQ(ranks_.size(), 2U);
    wanted_ = secret_of(ranks_[0]);
    ASSERT_EQ(wanted_.bytes.size(), kBytes);
  }
  static std::size_t count(const std::string& text, const std::string& what) {
    std::size_t found = 0;
    for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
    return found;
  }
  /// Files of the job that hold it.
  std::vector<std::string> files_that_tell() const {
    std::vector<std::string> found;
    std::size_t files = 0;
    for (const auto& each : fs::recursive_directory_iterator(job_->folder())) {
      if (!each.is_regular_file()) continue;
      ++files;
      if (wanted_.is_in(read_text(each.path()))) found.push_back(each.path());
    }
    EXPECT_GE(files, 3U);  // output, job.json, logs
    return found;
  }
  std::unique_ptr<Job> job_;
  std::vector<pid_t> ranks_;
  Wanted wanted_;
};

TEST_F(Secrecy, IsInNoCommandLineEnvironmentOrFile) {
  start();
  const std::vector<pid_t> all = job_->processes();
  EXPECT_GE(all.size(), 5U);  // launcher, guard, agent, ranks
  for (const pid_t pid : all) {
    EXPECT_FALSE(wanted_.is_in(read_text(proc(pid, "cmdline")))) << pid;
    EXPECT_FALSE(wanted_.is_in(read_text(proc(pid, "environ")))) << pid;
  }
  EXPECT_EQ(files_that_tell(), std::vector<std::string>());
  job_->signal(SIGTERM);
  job_->wait();
  EXPECT_EQ(files_that_tell(), std::vector<std::string>());  // nor in what it leaves
}

TEST(SecrecyOfDescriptors, WhatARankStartsInheritsNeitherSecretNorStatusPage) {
  // A wrapper passes them on; the library keeps them from what comes after it.
  const auto finished = run({{"run", "-np", "2", "--prefix", "none", "sh", "-c", HEALTH_PEER " starts; exit $?"}});
  EXPECT_EQ(finished.status, 0) << finished.out << finished.err;
  EXPECT_NE(finished.out.find("rank 1 is in"), std::string::npos) << finished.out << finished.err;
  EXPECT_NE(finished.out.find("child: 0 1 2 3\n"), std::string::npos) << finished.out;
  EXPECT_EQ(finished.out.find("10"), std::string::npos) << finished.out;
}

TEST_F(Secrecy, IsLockedInMemoryWhereTheLimitAllows) {
  start();
  const auto locked = [](pid_t pid) {
    return read_text(proc(pid, "status")).find("VmLck:\t       0 kB") == std::string::npos;
  };
  if (!locked(job_->pid())) GTEST_SKIP() << "RLIMIT_MEMLOCK does not allow it";
  for (const pid_t pid : job_->processes()) EXPECT_TRUE(locked(pid)) << read_text(proc(pid, "cmdline"));
}

TEST_F(Secrecy, IsWhereCoreDumpsDoNotReach) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "under a sanitizer memory is terabytes wide";
#endif
  start();
  bool hidden = false;
  for (const pid_t pid : job_->processes())
    EXPECT_FALSE(memory_shows(pid, wanted_, hidden)) << read_text(proc(pid, "cmdline"));
  EXPECT_TRUE(hidden);  // else the search finds nothing at all
}

TEST_F(Secrecy, IsWhereCoreDumpsDoNotReachWhileAnAgentIsAwaited) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "under a sanitizer memory is terabytes wide";
#endif
  // A command in place of ssh that begins and says nothing: the agent's invitation has been made, and not sent.
  JobOptions options{{"run", "-H", "localhost,elsewhere", "--ssh", "./mute", "true"}};
  options.shell_before = "printf '#!/bin/sh\\nexec sleep 1000\\n' > mute; chmod +x mute";
  Job job(options);
  const auto agent = [&] {
    const auto found = job.processes(COHORT_COMMAND " agent");
    return found.empty() ? 0 : found.front();
  };
  ASSERT_TRUE(eventually([&] {
    wanted_ = agent() == 0 ? Wanted{} : secret_of(agent());
    return wanted_.bytes.size() == kBytes && !job.processes("sleep").empty();
  })) << job.err();
  bool hidden = false;
  EXPECT_FALSE(memory_shows(job.pid(), wanted_, hidden));
  EXPECT_TRUE(hidden);
}

TEST_F(Secrecy, IsInNoRealCore) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "under a sanitizer memory is terabytes wide";
#endif
  std::string pattern = read_text("/proc/sys/kernel/core_pattern");
  pattern.erase(std::remove(pattern.begin(), pattern.end(), '\n'), pattern.end());
  rlimit limit{};
  ::getrlimit(RLIMIT_CORE, &limit);
  if (pattern.find_first_of("|/") != std::string::npos || limit.rlim_max != RLIM_INFINITY)
    GTEST_SKIP() << "cores do not go to the working directory here: " << pattern;
  for (const bool launcher : {false, true}) {
    start();
    if (launcher) {
      job_->signal(SIGABRT);
    } else {
      ::kill(ranks_[1], SIGABRT);
    }
    job_->wait();
    std::string core;
    for (const auto& each : fs::directory_iterator(job_->folder())) {
      if (each.path().filename().string().starts_with(pattern.substr(0, pattern.find('%')))) core = each.path();
    }
    ASSERT_NE(core, "") << (launcher ? "the launcher" : "a rank") << " left no core";
    const std::string bytes = read_text(core);
    EXPECT_GT(bytes.size(), 100'000U);
    EXPECT_NE(bytes.find("COHORT_"), std::string::npos);  // it is one of ours, with its data
    EXPECT_FALSE(wanted_.is_in(bytes));
    job_.reset();
  }
}

}  // namespace
}  // namespace cohort::test
