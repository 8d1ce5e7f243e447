// Checks that a latch respects the program's own signal handlers, which work before, beside and after it.
#include "base/signals.h"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <thread>
#include <vector>

namespace cohort::sys {
namespace {

std::atomic<int> plain_calls{0};
std::atomic<int> informed_by{0};
struct sigaction below = {};

void plain(int) { plain_calls.fetch_add(1); }
void informed(int, siginfo_t* info, void*) { informed_by.store(info->si_pid); }
void over(int number, siginfo_t* info, void* context) {
  plain_calls.fetch_add(100);
  below.sa_sigaction(number, info, context);
}

struct sigaction action_of(int number) {
  struct sigaction now = {};
  ::sigaction(number, nullptr, &now);
  return now;
}

SignalLatch latch_of(const std::vector<int>& signals) { return value_or_throw(SignalLatch::create(signals)); }

class SignalLatchTest : public testing::Test {
 protected:
  void SetUp() override {
    plain_calls = 0;
    informed_by = 0;
  }
  void TearDown() override {
    for (const int number : {SIGUSR1, SIGUSR2}) ::signal(number, SIG_DFL);
  }
};

TEST_F(SignalLatchTest, RemembersTheFirstOfItsSignalsInTheOrderGiven) {
  const SignalLatch latch = latch_of({SIGUSR1, SIGUSR2});
  EXPECT_EQ(latch.received(), 0);
  ::raise(SIGUSR2);
  EXPECT_EQ(latch.received(), SIGUSR2);
  ::raise(SIGUSR1);
  EXPECT_EQ(latch.received(), SIGUSR1);
  const SignalLatch later = latch_of({SIGUSR1, SIGUSR2});
  EXPECT_EQ(later.received(), 0) << "what came before it was made is another's";
}

TEST_F(SignalLatchTest, CallsTheHandlerThatWasThereAndPutsItBack) {
  ::signal(SIGUSR1, plain);
  struct sigaction action = {};
  action.sa_sigaction = informed;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGUSR2, &action, nullptr);
  {
    const SignalLatch latch = latch_of({SIGUSR1, SIGUSR2});
    ::raise(SIGUSR1);
    ::raise(SIGUSR2);
    EXPECT_EQ(plain_calls, 1);
    EXPECT_EQ(informed_by, ::getpid());
    EXPECT_EQ(latch.received(), SIGUSR1);
  }
  EXPECT_EQ(action_of(SIGUSR1).sa_handler, &plain);
  EXPECT_EQ(action_of(SIGUSR2).sa_sigaction, &informed);
}

TEST_F(SignalLatchTest, TheLastOfSeveralPutsBackWhatWasThere) {
  std::optional<SignalLatch> one = latch_of({SIGUSR1});
  std::optional<SignalLatch> two = latch_of({SIGUSR1});
  one.reset();
  ::raise(SIGUSR1);
  EXPECT_EQ(two->received(), SIGUSR1);
  two.reset();
  EXPECT_EQ(action_of(SIGUSR1).sa_handler, SIG_DFL);
}

TEST_F(SignalLatchTest, AHandlerInstalledOverItStaysAndNothingCallsInACircle) {
  std::optional<SignalLatch> latch = latch_of({SIGUSR1});
  struct sigaction action = {};
  action.sa_sigaction = over;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGUSR1, &action, &below);
  const SignalLatch second = latch_of({SIGUSR1});
  ::raise(SIGUSR1);
  EXPECT_EQ(plain_calls, 100);
  EXPECT_EQ(latch->received(), SIGUSR1);
  EXPECT_EQ(second.received(), SIGUSR1);
  latch.reset();
  EXPECT_EQ(action_of(SIGUSR1).sa_sigaction, &over);
  ::sigaction(SIGUSR1, &below, nullptr);  // restores it, for the end of the second latch
}

TEST_F(SignalLatchTest, HandlersThatAreKeptOutliveEveryLatch) {
  // Uses signals of no other test, since their handlers are kept as long as this process runs.
  ::signal(SIGALRM, plain);
  std::optional<SignalLatch> one = latch_of({SIGHUP, SIGALRM});
  one->keep_handlers();
  ::raise(SIGALRM);
  EXPECT_EQ(one->received(), SIGALRM);
  one.reset();
  (void)latch_of({SIGHUP, SIGALRM});
  ::raise(SIGHUP);  // would otherwise end this process
  ::raise(SIGALRM);
  EXPECT_EQ(plain_calls, 2) << "the program's own is called as before";
  const SignalLatch later = latch_of({SIGHUP});
  EXPECT_EQ(later.received(), 0);
  ::raise(SIGHUP);
  EXPECT_EQ(later.received(), SIGHUP);
}

TEST_F(SignalLatchTest, ThreadsThatMakeAndDropLatchesDisturbNoOther) {
  const SignalLatch latch = latch_of({SIGUSR1});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 200; ++round) (void)latch_of({SIGUSR1, SIGUSR2});
    });
  }
  for (int round = 0; round < 100; ++round) ::raise(SIGUSR1);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(latch.received(), SIGUSR1);
  EXPECT_EQ(action_of(SIGUSR2).sa_handler, SIG_DFL);
}

TEST_F(SignalLatchTest, RefusesWhatCannotBeWaitedFor) {
  for (const std::vector<int>& signals : std::vector<std::vector<int>>{{}, {0}, {-1}, {NSIG}, {SIGKILL}, {SIGSEGV}}) {
    const auto latch = SignalLatch::create(signals);
    ASSERT_FALSE(latch);
    EXPECT_EQ(latch.error().code(), ErrorCode::InvalidArgument);
  }
  EXPECT_FALSE(SignalLatch::create({SIGUSR1, SIGKILL}));
  EXPECT_EQ(action_of(SIGUSR1).sa_handler, SIG_DFL) << "refused as a whole";
}

}  // namespace
}  // namespace cohort::sys
