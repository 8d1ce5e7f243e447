// Preemption of ranks that are threads: one answer on all, at the same call. Processes and the command are tested in
// tests/e2e/preemption_test.cpp.
#include "comm/testing/worlds.h"

#include <cohort/error.h>
#include <cohort/preemption.h>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <latch>
#include <string>

namespace cohort {
namespace {

/// Returns how many calls of each rank said no, if a signal comes at rank 1's 100th call and the others are anywhere.
std::array<std::int64_t, 3> calls_until_yes(const PreemptionOptions& options, int signal) {
  std::array<std::int64_t, 3> calls{};
  std::atomic<bool> sent{false};
  comm::testing::run_world(3, [&](Communicator comm) {
    Preemption preemption(options);
    comm.barrier().wait();  // all have a Preemption before a signal comes
    std::int64_t& mine = calls[static_cast<std::size_t>(comm.rank())];
    while (!preemption.requested(comm)) {
      ++mine;
      if (mine == 100 && comm.rank() == 1 && !sent.exchange(true)) ::raise(signal);
    }
    EXPECT_EQ(preemption.signal(), signal);
    EXPECT_TRUE(preemption.requested(comm)) << "it stays yes";
    EXPECT_EQ(preemption.received(), signal);
  });
  return calls;
}

TEST(Preemption, AllRanksGetTheSameAnswerAtTheSameCall) {
  for (int round = 0; round < 20; ++round) {
    const auto calls = calls_until_yes(PreemptionOptions(), round % 2 == 0 ? SIGUSR1 : SIGTERM);
    EXPECT_EQ(calls[0], calls[1]);
    EXPECT_EQ(calls[0], calls[2]);
    EXPECT_EQ(calls[0], 100) << "the very next question";
  }
}

TEST(Preemption, MayBeAskedEveryFewStepsOnly) {
  const auto calls = calls_until_yes({.every = 8}, SIGUSR1);
  EXPECT_EQ(calls[0], calls[1]);
  EXPECT_EQ(calls[0], calls[2]);
  EXPECT_EQ(calls[0], 103) << "the first question after it is call number 104";
}

TEST(Preemption, AWorldOfOneAsksItself) {
  Preemption preemption;
  Communicator nobody;
  EXPECT_FALSE(preemption.requested(nobody));
  EXPECT_EQ(preemption.received(), 0);
  ::raise(SIGUSR1);
  EXPECT_EQ(preemption.received(), SIGUSR1);
  EXPECT_EQ(preemption.signal(), 0) << "nobody has asked yet";
  EXPECT_TRUE(preemption.requested(nobody));
  EXPECT_EQ(preemption.signal(), SIGUSR1);
}

TEST(Preemption, RefusesWhatHasNoMeaning) {
  EXPECT_THROW(Preemption(PreemptionOptions{.every = 0}), Error);
  EXPECT_THROW(Preemption(PreemptionOptions{.signals = {}}), Error);
  EXPECT_THROW(Preemption(PreemptionOptions{.signals = {SIGKILL}}), Error);
}

TEST(Preemption, ARankThatDoesNotAskIsNamedInTime) {
  std::latch done(1);
  comm::testing::run_world(2, [&](Communicator comm) {
    Preemption preemption({.timeout = std::chrono::milliseconds(50)});
    if (comm.rank() == 1) return done.wait();
    const std::string text = comm::testing::what_of([&] { preemption.requested(comm); }, ErrorCode::Timeout);
    done.count_down();
    EXPECT_TRUE(comm::testing::contains(text, "rank 1")) << text;
  });
}

}  // namespace
}  // namespace cohort
