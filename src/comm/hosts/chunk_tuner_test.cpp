#include "comm/hosts/context.h"

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

std::int64_t ahead_of(const ChunkTuner& tuner, int doublings) { return tuner.ahead(doublings, tuner.on_the_way()); }

TEST(HostsChunkTuner, StaysAtItsLeastAt1Gbit) {
  for (const auto& [hosts, locals] : {std::pair(2, 1), std::pair(2, 4), std::pair(4, 1), std::pair(8, 2)}) {
    const Layout here = layout(hosts, locals);
    ChunkTuner tuner(here);
    EXPECT_EQ(tuner.doublings(), 0);
    // 125 MB a second for all stripes of a host together.
    for (int i = 0; i < 4; ++i)
      tuner.learn(16 * kMiB / static_cast<std::size_t>(locals), std::chrono::microseconds(134218));
    EXPECT_EQ(tuner.doublings(), 0) << hosts << " x " << locals;
    EXPECT_EQ(ahead_of(tuner, 0), 3);
    EXPECT_EQ(tuner.piece_bytes(), (locals == 1 ? 32 : 64) * kKiB);
  }
}

TEST(HostsChunkTuner, PiecesTakeTheWiresTime) {
  const Layout two = layout(2, 1);
  ChunkTuner tuner(two);
  tuner.learn(16 * kMiB, 32ms);  // 0.5 MiB in a millisecond, in eight pieces
  EXPECT_EQ(tuner.piece_bytes(tuner.doublings()), 64 * kKiB);
  EXPECT_EQ(ahead_of(tuner, tuner.doublings()), 8);
  EXPECT_EQ(ahead_of(tuner, 0), 16);  // where another rank wants them short
}

TEST(HostsChunkTuner, FramesHaveABound) {
  for (const auto& [hosts, locals] : {std::pair(2, 1), std::pair(2, 4), std::pair(4, 1), std::pair(3, 2)}) {
    const Layout here = layout(hosts, locals);
    ChunkTuner tuner(here);
    tuner.learn(64 * kMiB, 1ms);
    EXPECT_EQ(tuner.doublings(), tuner.most());
    const std::size_t frames = static_cast<std::size_t>(locals * (hosts > 2 ? hosts : 1));
    const std::size_t most = (locals == 1 ? 128 : 64) * kKiB;
    EXPECT_LE(tuner.piece_bytes(tuner.most()) / frames, most) << hosts << " x " << locals;
    EXPECT_GT(tuner.piece_bytes(tuner.most() + 1) / frames, most) << hosts << " x " << locals;
    EXPECT_LE(ahead_of(tuner, 0), ChunkTuner::kMostAhead);
  }
}

TEST(HostsChunkTuner, ForgetsAWireThatHasBecomeSlow) {
  const Layout four = layout(4, 1);
  ChunkTuner tuner(four);
  tuner.learn(64 * kMiB, 10ms);
  EXPECT_GT(tuner.doublings(), 0);
  for (int i = 0; i < 12; ++i) tuner.learn(kMiB, 10ms);
  EXPECT_EQ(tuner.doublings(), 0);
}

TEST(HostsChunkTuner, ShortSumsShowThatAWireIsFastAndNeverThatItIsSlow) {
  const Layout two = layout(2, 1);
  ChunkTuner tuner(two);
  tuner.learn(128 * kKiB - 1, 1us);
  tuner.learn(kMiB, 0ns);
  EXPECT_EQ(tuner.doublings(), 0);
  EXPECT_EQ(ahead_of(tuner, 0), 3);
  tuner.learn(512 * kKiB, 1ms);
  EXPECT_EQ(tuner.doublings(), 1);
  EXPECT_EQ(ahead_of(tuner, 1), 8);
  tuner.learn(128 * kKiB, 100ms);
  EXPECT_EQ(ahead_of(tuner, 1), 8);
  tuner.learn(kMiB, 1000ms);  // one that is long enough to show it
  EXPECT_EQ(ahead_of(tuner, 1), 4);
}

TEST(HostsChunkTuner, BlocksOfShortSumsAreShorter) {
  const Layout many = layout(2, 2);
  ChunkTuner tuner(many);
  EXPECT_EQ(tuner.block_bytes(100 * kKiB, 0), 32 * kKiB);
  EXPECT_EQ(tuner.block_bytes(400 * kKiB, 0), 32 * kKiB);
  EXPECT_EQ(tuner.block_bytes(64 * kMiB, 0), 64 * kKiB);
  EXPECT_EQ(tuner.block_bytes(400 * kKiB, 1), 32 * kKiB);
  EXPECT_EQ(tuner.block_bytes(640 * kKiB, 1), 64 * kKiB);
  EXPECT_EQ(tuner.block_bytes(64 * kMiB, 1), 128 * kKiB);
}

TEST(HostsChunkTuner, OfSeveralHostsShortSumsHaveAFewPieces) {
  const Layout four = layout(4, 1);
  EXPECT_EQ(ChunkTuner(four).doublings_of(256 * kKiB, 4), 2);
  EXPECT_EQ(ChunkTuner(four).doublings_of(2 * kMiB, 4), 3);
  EXPECT_EQ(ChunkTuner(four).doublings_of(16 * kMiB, 4), 4);
  EXPECT_EQ(ChunkTuner(four).doublings_of(16 * kMiB, 1), 1);
  const Layout two = layout(2, 1);
  EXPECT_EQ(ChunkTuner(two).doublings_of(256 * kKiB, 2), 2);
}

}  // namespace
}  // namespace cohort::comm::hosts
