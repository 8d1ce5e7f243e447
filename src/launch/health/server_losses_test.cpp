#include "launch/health/server_losses.h"

#include <gtest/gtest.h>

#include <csignal>
#include <optional>

namespace cohort::launch {
namespace {

Ending killed(int number) {
  Ending ending;
  ending.role = Role::Server;
  ending.rank = number;
  ending.host = "h";
  ending.status.signal = SIGKILL;
  return ending;
}

TEST(ServerLosses, RestartsComeFirstAndThenTheOthersGoOn) {
  using Outcome = ServerLosses::Outcome;
  ServerLosses losses(1, 1);
  const auto again = losses.after(4, killed(0), 3);
  EXPECT_EQ(again.outcome, Outcome::Again);
  EXPECT_NE(again.text.find("started again (1 of 1 times"), std::string::npos) << again.text;
  Ending second = killed(0);
  losses.recall(4, second);
  EXPECT_EQ(second.restarts, 1);
  EXPECT_FALSE(second.first_cause.empty());
  EXPECT_EQ(losses.after(4, second, 3).outcome, Outcome::Without);
  EXPECT_EQ(losses.after(5, killed(1), 2).outcome, Outcome::Failed) << "no more may be lost";
}

TEST(ServerLosses, AWrongOptionIsNotTriedAgain) {
  ServerLosses losses(1, 1);
  for (const ErrorCode code : {ErrorCode::InvalidArgument, ErrorCode::Mismatch}) {
    Ending ending = killed(0);
    ending.cause.code = static_cast<int>(code);
    EXPECT_EQ(losses.after(4, ending, 3).outcome, ServerLosses::Outcome::Failed);
  }
  Ending ending = killed(0);
  ending.cause.code = static_cast<int>(ErrorCode::Io);
  EXPECT_EQ(losses.after(4, ending, 3).outcome, ServerLosses::Outcome::Again) << "there may be room by then";
}

TEST(ServerLosses, TheLastServerIsNotGoneOnWithout) {
  ServerLosses losses(0, 5);
  EXPECT_EQ(losses.after(4, killed(0), 1).outcome, ServerLosses::Outcome::Failed);
  EXPECT_EQ(losses.after(4, killed(0), 2).outcome, ServerLosses::Outcome::Without);
}

TEST(ServerLosses, WhatAnAgentSaysOfARestartCountsOnce) {
  ServerLosses losses(2, 0);
  EXPECT_FALSE(losses.settle(4));
  losses.after(4, killed(0), 1);
  const auto before = losses.settle(4);
  ASSERT_TRUE(before);
  EXPECT_EQ(before->status.signal, SIGKILL);
  EXPECT_FALSE(losses.settle(4));
}

TEST(ServerLosses, AHostIsLostWithAllItsServersOrNotAtAll) {
  ServerLosses losses(1, 2);
  losses.after(4, killed(0), 4);
  EXPECT_FALSE(losses.after_host("a", "why", {4, 5, 6}, "servers 0-2", 4)) << "more than may be lost";
  EXPECT_FALSE(losses.after_host("a", "why", {4, 5}, "servers 0-1", 2)) << "none would be left";
  const auto text = losses.after_host("a", "why", {4, 5}, "servers 0-1", 4);
  ASSERT_TRUE(text);
  EXPECT_EQ(*text,
            "servers 0-1 on a are lost with their host (why); the job goes on without (2 of 2 that may be, "
            "--lost-servers)");
  EXPECT_FALSE(losses.settle(4)) << "nothing is awaited of a host that is lost";
  EXPECT_TRUE(losses.after_host("b", "why", {}, "", 4)) << "nothing ran there any more";
}

TEST(ServerLosses, AnotherEpochForgetsLossesAndCountsRestartsOn) {
  ServerLosses losses(1, 1);
  losses.after(4, killed(0), 3);
  losses.after(4, killed(0), 3);
  losses.begin_epoch();
  Ending next = killed(0);
  losses.recall(4, next);
  EXPECT_EQ(next.restarts, 0);
  EXPECT_EQ(losses.after(4, next, 3).outcome, ServerLosses::Outcome::Without);
}

}  // namespace
}  // namespace cohort::launch
