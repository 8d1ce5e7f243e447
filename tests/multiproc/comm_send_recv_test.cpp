// Send and receive between processes: sizes that go each way, peers that are killed or stopped in the midst of it, and
// forked children.
#include "comm/testing/worlds.h"
#include "comm_processes.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace cohort::testing {
namespace {

using comm::testing::contains;

/// Large messages through the kernel, or in fragments.
class SendRecv : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ::setenv("COHORT_PLAN", GetParam(), 1); }
  void TearDown() override { ::unsetenv("COHORT_PLAN"); }
};
INSTANTIATE_TEST_SUITE_P(Plans, SendRecv, ::testing::Values("", "cross=off"),
                         [](const auto& plan) { return std::string(*plan.param == '\0' ? "Pull" : "Fragments"); });

TEST_P(SendRecv, AroundARingOfProcesses) {
  for (const int size : {2, 3, 9}) {
    Processes world(size);
    world.start([&](Communicator comm) -> std::string {
      const int next = (comm.rank() + 1) % size;
      const int before = (comm.rank() + size - 1) % size;
      for (const std::size_t count : {0U, 1U, 10U, 11U, 4096U, 20000U, 300001U}) {
        std::vector<std::int32_t> out(count);
        std::iota(out.begin(), out.end(), comm.rank() * 1000);
        std::vector<std::int32_t> in(count);
        for (int turn = 0; turn < 3; ++turn) {
          Work sent = comm.send(std::span(out), next, {.tag = turn});
          comm.recv(std::span(in), before, {.tag = turn}).wait();
          sent.wait();
          for (std::size_t i = 0; i < count; ++i) {
            if (in[i] != before * 1000 + static_cast<std::int32_t>(i)) return "wrong at " + std::to_string(i);
          }
        }
      }
      return "right";
    });
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(world.collect(rank).said, "right");
  }
}

/// Rank 1 is killed while large messages go to and fro; rank 0 names it, soon.
TEST_P(SendRecv, KilledInTheMidstOfALargeMessage) {
  for (const bool sends : {true, false}) {
    Processes world(2);
    world.start([&](Communicator comm) -> std::string {
      std::vector<float> values(std::size_t{16} << 20);
      for (int i = 0;; ++i) {
        if (i == 2 && comm.rank() == 1) world.raise_flag("busy");
        if ((comm.rank() == 0) == sends) {
          comm.send(std::span(values), 1 - comm.rank()).wait();
        } else {
          comm.recv(std::span(values), 1 - comm.rank()).wait();
        }
      }
    });
    ASSERT_TRUE(world.await_flag("busy"));
    world.kill(1, SIGKILL);
    const auto killed = Clock::now();
    const Ending ending = world.collect(0);
    EXPECT_LT(Clock::now() - killed, 15s);
    EXPECT_TRUE(contains(ending.said, "PeerLost: ")) << ending.said;
    EXPECT_TRUE(contains(ending.said, "lost rank 1 (testhost, pid " + std::to_string(world.pid(1)) + ")"))
        << ending.said;
    EXPECT_TRUE(
        contains(ending.said, sends ? "send(float32[16777216], to rank 1" : "recv(float32[16777216], from rank 1"))
        << ending.said;
    EXPECT_TRUE(world.collect(1).killed_by(SIGKILL));
  }
}

TEST_P(SendRecv, StoppedPeerIsNamedWhenTheDeadlinePasses) {
  for (const bool sends : {true, false}) {
    Processes world(2);
    world.start([&](Communicator comm) -> std::string {
      std::vector<double> values(100000);
      if (comm.rank() == 1) {
        ::raise(SIGSTOP);
        comm.barrier().wait();
      }
      if (sends) {
        comm.send(std::span(values), 1, {.tag = 4, .timeout = 300ms}).wait();
      } else {
        comm.recv(std::span(values), 1, {.tag = 4, .timeout = 300ms}).wait();
      }
      return "done";
    });
    const Ending ending = world.collect(0);
    EXPECT_TRUE(contains(ending.said, "Timeout: ")) << ending.said;
    EXPECT_TRUE(contains(ending.said, sends ? "send(float64[100000], to rank 1, tag 4) timed out after 300 ms"
                                            : "recv(float64[100000], from rank 1, tag 4) timed out after 300 ms"))
        << ending.said;
    EXPECT_TRUE(contains(ending.said, "rank 1 (pid " + std::to_string(world.pid(1)) + ") did not")) << ending.said;
    world.kill(1, SIGCONT);
    const Ending late = world.collect(1);  // it learns that it was given up
    EXPECT_TRUE(contains(late.said, "Aborted: ")) << late.said;
  }
}

TEST_P(SendRecv, ExitingAfterASendDeliversItAndIsThenALostPeer) {
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    int value = 5;
    if (comm.rank() == 1) {
      comm.send(std::span(&value, 1), 0).wait();
      ::_exit(0);
    }
    std::this_thread::sleep_for(20ms);
    value = 0;
    comm.recv(std::span(&value, 1), 1).wait();
    if (value != 5) return "wrong";
    comm.recv(std::span(&value, 1), 1).wait();
    return "got what nobody sent";
  });
  const Ending ending = world.collect(0);
  EXPECT_TRUE(contains(ending.said, "PeerLost: ") && contains(ending.said, "recv(int32[1], from rank 1, tag 0)"))
      << ending.said;
}

TEST_P(SendRecv, ARankThatDiesIsNamedByAReceiveFromAnySource) {
  for (const int victim : {1, 2, 3}) {
    Processes world(4);
    world.start([victim](Communicator comm) -> std::string {
      int value = comm.rank();
      if (comm.rank() == victim) {
        comm.send(std::span(&value, 1), 0).wait();
        comm.recv(std::span(&value, 1), 0).wait();  // only then is what was sent known to be received
        ::_exit(0);
      }
      if (comm.rank() == 0) {
        Work first = comm.recv(std::span(&value, 1), kAnySource);
        first.wait();
        if (first.source() != victim || value != victim) return "wrong";
        Work second = comm.recv(std::span(&value, 1), kAnySource);
        comm.send(std::span(&value, 1), victim).wait();
        second.wait();
        return "got what nobody sent";
      }
      comm.barrier().wait();
      return "all came to the barrier";
    });
    const Ending ending = world.collect(0);
    EXPECT_TRUE(contains(ending.said, "PeerLost: ") &&
                contains(ending.said, "recv(int32[1], from any rank, tag 0) failed") &&
                contains(ending.said, "lost rank " + std::to_string(victim)))
        << ending.said;
  }
}

TEST_P(SendRecv, ForkedChildTouchesNothing) {
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    std::vector<int> values(200000, comm.rank());
    if (comm.rank() == 0) {
      Work work = comm.recv(std::span(values), 1);
      const pid_t child = ::fork();
      if (child == 0) {
        bool refused = false;
        try {
          work.wait();
        } catch (const Error& error) {
          refused = error.code() == ErrorCode::InvalidArgument;
        }
        work = Work();
        comm = Communicator();
        ::_exit(refused ? 0 : 1);
      }
      int status = -1;
      ::waitpid(child, &status, 0);
      comm.barrier().wait();
      work.wait();
      return status == 0 && values[199999] == 1 ? "right" : "wrong";
    }
    comm.barrier().wait();
    comm.send(std::span(values), 0).wait();
    return "right";
  });
  EXPECT_EQ(world.collect(0).said, "right");
  EXPECT_EQ(world.collect(1).said, "right");
}

}  // namespace
}  // namespace cohort::testing
