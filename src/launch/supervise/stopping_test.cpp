#include "launch/supervise/stopping.h"

#include <gtest/gtest.h>

#include <csignal>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;

const Stopping::Clock::time_point kStart{std::chrono::hours(1)};

TEST(Stopping, AnInterruptIsFollowedByTermAfterItsGrace) {
  Stopping stopping(5000ms);
  const auto first = stopping.begin("told", SIGINT, {5000ms}, kStart);
  EXPECT_EQ(first.signal, SIGINT);
  EXPECT_EQ(first.grace.usual, 10000ms) << "agents kill behind the second signal's grace";
  EXPECT_FALSE(stopping.look(kStart + 4999ms).order);
  const auto due = stopping.look(kStart + 5000ms);
  ASSERT_TRUE(due.order);
  EXPECT_EQ(due.order->signal, SIGTERM);
  EXPECT_EQ(due.order->grace.usual, 5000ms);
  EXPECT_EQ(stopping.reason(), "told");
}

TEST(Stopping, EachFurtherRequestIsHarder) {
  Stopping stopping(5000ms);
  stopping.begin("told", SIGINT, {5000ms}, kStart);
  EXPECT_EQ(stopping.hurry(kStart + 1s).signal, SIGTERM);
  const auto last = stopping.hurry(kStart + 2s);
  EXPECT_EQ(last.signal, SIGKILL);
  EXPECT_EQ(last.grace.usual, 0ms);
}

TEST(Stopping, WhoWaitsIsToldNowAndThen) {
  Stopping stopping(30000ms);
  stopping.begin("told", SIGTERM, {30000ms}, kStart);
  ASSERT_TRUE(stopping.next_look());
  EXPECT_EQ(*stopping.next_look(), kStart + 1s);
  EXPECT_TRUE(stopping.look(kStart + 1s).notice);
  const std::string text = stopping.notice(2, "", kStart + 1s);
  EXPECT_EQ(text.find("told; 2 ranks still running, 29 s until SIGKILL"), 0U) << text;
  EXPECT_GT(*stopping.next_look(), kStart + 3s);
  stopping.be_quiet();
  EXPECT_FALSE(stopping.look(kStart + 20s).notice);
}

TEST(Stopping, AgentsAreGivenUpLaterWhereRanksSave) {
  Stopping stopping(1000ms);
  stopping.begin("told", SIGTERM, {1000ms, 60000ms}, kStart);
  stopping.they_save(kStart + 500ms);
  EXPECT_FALSE(stopping.look(kStart + 70s).give_up);
  EXPECT_TRUE(stopping.look(kStart + 75s).give_up);
  stopping.finish();
  EXPECT_FALSE(stopping.next_look());
}

}  // namespace
}  // namespace cohort::launch
