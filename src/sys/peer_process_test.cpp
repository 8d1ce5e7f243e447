#include "sys/peer_process.h"

#include "base/sanitized.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace cohort::sys {
namespace {

using namespace std::chrono_literals;

bool becomes_gone(const PeerProcess& process) {
  const auto limit = std::chrono::steady_clock::now() + 20s;
  while (!process.gone()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST(PeerProcess, KnowsTheLivingFromTheDead) {
  EXPECT_FALSE(PeerProcess().gone());
  EXPECT_FALSE(PeerProcess(own_process()).gone());
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const PeerProcess process({child, 0});
  EXPECT_FALSE(process.gone());
  ::kill(child, SIGKILL);
  EXPECT_TRUE(becomes_gone(process));  // also before anyone has waited for it
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(process.gone());
  EXPECT_TRUE(PeerProcess({child, 0}).gone());
}

TEST(PeerProcess, IsNotAnotherOneWithTheSamePid) {
  ProcessId other = own_process();
  ASSERT_NE(other.start_time, 0u);
  ++other.start_time;
  EXPECT_TRUE(PeerProcess(other).gone());
}

TEST(PeerProcess, LivesOnWhenItsFirstThreadEnds) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([&] {
      std::this_thread::sleep_for(50ms);
      static_cast<void>(::write(ready[1], "x", 1));
      ::pause();
    }).detach();
    ::syscall(SYS_exit, 0);  // of this thread alone; pthread_exit would unwind the test
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const PeerProcess process({child, 0});
  EXPECT_FALSE(process.gone());
  ::kill(child, SIGKILL);
  EXPECT_TRUE(becomes_gone(process));
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(PeerProcess, IsNotDeadForWantOfADescriptor) {
  if (kUndefinedBehaviorSanitizer) GTEST_SKIP() << "UBSan looks at objects through a pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const PeerProcess process({child, 0});
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{0, files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool first = process.gone();
  const bool without_stat = PeerProcess({child, 0}).gone();
  ::kill(child, SIGKILL);
  const bool last = becomes_gone(process);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(first);
  EXPECT_FALSE(without_stat);
  EXPECT_TRUE(last);
}

TEST(Cores, AreAtLeastOne) { EXPECT_GE(count(allowed_cores()), 1); }

}  // namespace
}  // namespace cohort::sys
