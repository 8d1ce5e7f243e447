#include "launch/start/capture.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;

TEST(CaptureTest, TakesTextAndStatus) {
  const auto got = capture({"sh", "-c", "echo out; echo err >&2; exit 3"}, 30s);
  ASSERT_TRUE(got) << got.error().what();
  EXPECT_EQ(got->status, 3);
  EXPECT_EQ(got->text, "out\nerr\n");
  const auto much = capture({"head", "-c", "5000000", "/dev/zero"}, 30s);
  ASSERT_TRUE(much);
  EXPECT_LT(much->text.size(), std::size_t{2} << 20);
}

TEST(CaptureTest, WaitsForNobody) {
  const auto since = std::chrono::steady_clock::now();
  const auto slow = capture({"sleep", "1000"}, 200ms);
  ASSERT_FALSE(slow);
  EXPECT_EQ(slow.error().code(), ErrorCode::Timeout);
  const auto closed = capture({"sh", "-c", "exec >&- 2>&-; sleep 1000"}, 200ms);
  EXPECT_FALSE(closed);
  const auto left = capture({"sh", "-c", "sleep 1000 & echo here"}, 30s);
  ASSERT_TRUE(left) << left.error().what();
  EXPECT_EQ(left->text, "here\n");
  EXPECT_LT(std::chrono::steady_clock::now() - since, 25s);
}

TEST(CaptureTest, SaysWhatIsNotThere) {
  const auto none = capture({"no-such-program-anywhere"}, 1s);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::Unavailable);
}

}  // namespace
}  // namespace cohort::launch
