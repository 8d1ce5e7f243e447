#include "comm/hosts/pace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <vector>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

Layout layout(int hosts, int locals) {
  std::vector<int> host_of;
  for (int rank = 0; rank < hosts * locals; ++rank) host_of.push_back(rank / locals);
  return {host_of, 0};
}

TEST(HostsPace, StaysAtItsLeastAt1Gbit) {
  for (const auto& [hosts, locals] : {std::pair(2, 1), std::pair(2, 4), std::pair(4, 1), std::pair(8, 2)}) {
    const Layout here = layout(hosts, locals);
    Pace pace(here);
    EXPECT_EQ(pace.doublings(), 0);
    // 125 MB a second for all columns of a host together.
    for (int i = 0; i < 4; ++i)
      pace.learn(16 * kMiB / static_cast<std::size_t>(locals), std::chrono::microseconds(134218));
    EXPECT_EQ(pace.doublings(), 0) << hosts << " x " << locals;
    EXPECT_EQ(pace.ahead(0), 3);
    EXPECT_EQ(pace.piece_bytes(), (locals == 1 ? 32 : 64) * kKiB);
  }
}

TEST(HostsPace, PiecesTakeTheWiresTime) {
  const Layout two = layout(2, 1);
  Pace pace(two);
  pace.learn(16 * kMiB, 32ms);  // 0.5 MiB in a millisecond, in eight pieces
  EXPECT_EQ(pace.piece_bytes(pace.doublings()), 64 * kKiB);
  EXPECT_EQ(pace.ahead(pace.doublings()), 8);
  EXPECT_EQ(pace.ahead(0), 16);  // where another rank wants them short
}

TEST(HostsPace, NoFrameIsLongerThanWhatIsKeptForThoseWhoComeLate) {
  for (const auto& [hosts, locals] : {std::pair(2, 1), std::pair(2, 4), std::pair(4, 1), std::pair(3, 2)}) {
    const Layout here = layout(hosts, locals);
    Pace pace(here);
    pace.learn(64 * kMiB, 1ms);
    EXPECT_EQ(pace.doublings(), pace.most());
    const std::size_t frames = static_cast<std::size_t>(locals * (hosts > 2 ? hosts : 1));
    EXPECT_LE(pace.piece_bytes(pace.most()) / frames, 64 * kKiB) << hosts << " x " << locals;
    EXPECT_GT(pace.piece_bytes(pace.most() + 1) / frames, 64 * kKiB) << hosts << " x " << locals;
    EXPECT_LE(pace.ahead(0), Pace::kMostAhead);
  }
}

TEST(HostsPace, ForgetsAWireThatHasBecomeSlow) {
  const Layout four = layout(4, 1);
  Pace pace(four);
  pace.learn(64 * kMiB, 10ms);
  EXPECT_GT(pace.doublings(), 0);
  for (int i = 0; i < 12; ++i) pace.learn(kMiB, 10ms);
  EXPECT_EQ(pace.doublings(), 0);
}

TEST(HostsPace, ShortSumsShowThatAWireIsFastAndNeverThatItIsSlow) {
  const Layout two = layout(2, 1);
  Pace pace(two);
  pace.learn(128 * kKiB - 1, 1us);
  pace.learn(kMiB, 0ns);
  EXPECT_EQ(pace.doublings(), 0);
  EXPECT_EQ(pace.ahead(0), 3);
  pace.learn(512 * kKiB, 1ms);
  EXPECT_EQ(pace.doublings(), 1);
  EXPECT_EQ(pace.ahead(1), 8);
  pace.learn(128 * kKiB, 100ms);
  EXPECT_EQ(pace.ahead(1), 8);
  pace.learn(kMiB, 1000ms);  // one that is long enough to tell
  EXPECT_EQ(pace.ahead(1), 4);
}

TEST(HostsPace, BlocksOfShortSumsAreShorter) {
  const Layout many = layout(2, 2);
  Pace pace(many);
  EXPECT_EQ(pace.block_bytes(100 * kKiB, 0), 32 * kKiB);
  EXPECT_EQ(pace.block_bytes(400 * kKiB, 0), 32 * kKiB);
  EXPECT_EQ(pace.block_bytes(64 * kMiB, 0), 64 * kKiB);
  EXPECT_EQ(pace.block_bytes(400 * kKiB, 1), 32 * kKiB);
  EXPECT_EQ(pace.block_bytes(640 * kKiB, 1), 64 * kKiB);
  EXPECT_EQ(pace.block_bytes(64 * kMiB, 1), 128 * kKiB);
}

}  // namespace
}  // namespace cohort::comm::hosts
