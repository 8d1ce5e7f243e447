#include "launch/watch/clock_sync.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace cohort::launch {
namespace {

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

/// A real connection to a host whose clock is ahead by so much.
ClockOffset measure_over_a_connection(std::int64_t ahead_ns) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) std::abort();
  std::thread there([fd = ends[1], ahead_ns] {
    std::uint64_t number = 0;
    while (::recv(fd, &number, sizeof number, 0) == sizeof number) {
      const std::int64_t answer[2] = {static_cast<std::int64_t>(number), now_ns() + ahead_ns};
      if (::send(fd, answer, sizeof answer, 0) != sizeof answer) break;
    }
  });
  std::optional<ClockOffset> found;
  ClockSync sync({now_ns, [fd = ends[0]](std::uint64_t number) { EXPECT_EQ(::send(fd, &number, 8, 0), 8); },
                  [&found](const ClockOffset& offset) { found = offset; }});
  sync.begin();
  while (!found) {
    std::int64_t answer[2];
    if (::recv(ends[0], answer, sizeof answer, 0) != sizeof answer) break;
    sync.answer(static_cast<std::uint64_t>(answer[0]), answer[1]);
  }
  ::shutdown(ends[0], SHUT_RDWR);
  there.join();
  ::close(ends[0]);
  ::close(ends[1]);
  return found.value_or(ClockOffset{0, INT64_MAX, 0});
}

TEST(ClockSyncTest, AShiftedClockIsFoundWithinTheUncertaintyThatIsStated) {
  for (const std::int64_t ahead :
       {std::int64_t{0}, std::int64_t{11'560'000'000}, std::int64_t{-3'600'000'000'000}, std::int64_t{17}}) {
    const ClockOffset found = measure_over_a_connection(ahead);
    EXPECT_LE(std::llabs(found.offset_ns - ahead), found.uncertainty_ns) << ahead;
    EXPECT_LT(found.uncertainty_ns, 5'000'000) << "16 messages there and back, and none within 10 ms";
  }
}

TEST(ClockSyncTest, TheWayThatTakesLongerOneWayIsWithinTheUncertainty) {
  // Time passes only where this says so.
  std::mt19937 random(7);
  for (int trial = 0; trial < 1000; ++trial) {
    std::int64_t here = 10'000'000'000'000;  // no clock says less than 0
    const std::int64_t ahead = std::int64_t{static_cast<std::int32_t>(random())} * 1000;
    std::optional<ClockOffset> found;
    std::uint64_t asked = 0;
    ClockSync sync({[&] { return here; }, [&](std::uint64_t number) { asked = number; },
                    [&](const ClockOffset& offset) { found = offset; }});
    sync.begin();
    sync.begin();  // one round at a time
    while (!found) {
      here += static_cast<std::int64_t>(random() % 1'000'000);  // there
      const std::int64_t there = here + ahead;
      here += static_cast<std::int64_t>(random() % 1'000);  // back is fast
      sync.answer(asked + 1, 5);                            // not what was asked
      sync.answer(asked, there);
    }
    ASSERT_LE(std::llabs(found->offset_ns - ahead), found->uncertainty_ns);
    ASSERT_GE(asked, static_cast<std::uint64_t>(ClockSync::kQuestions));
    ASSERT_LE(asked, static_cast<std::uint64_t>(ClockSync::kMostQuestions));
    if (found->uncertainty_ns > ClockSync::kSoon) {
      ASSERT_EQ(asked, static_cast<std::uint64_t>(ClockSync::kMostQuestions));
    }
  }
}

TEST(ClockSyncTest, ARoundThatIsCutShortCounts) {
  std::vector<ClockOffset> found;
  std::int64_t here = 100;
  ClockSync sync(
      {[&] { return here; }, [](std::uint64_t) {}, [&](const ClockOffset& offset) { found.push_back(offset); }});
  sync.end();
  sync.begin();
  here += 10;
  sync.answer(1, 1105);
  sync.end();
  sync.end();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].offset_ns, 1000);
  EXPECT_EQ(found[0].uncertainty_ns, 5);
}

}  // namespace
}  // namespace cohort::launch
