#include "sys/thread.h"

#include <gtest/gtest.h>

#include <csignal>

namespace cohort::sys {
namespace {

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

}  // namespace
}  // namespace cohort::sys
