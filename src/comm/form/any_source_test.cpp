// Receives from any source between ranks that are threads. The same tests run where ranks are on several hosts.
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort {
namespace {

using namespace std::chrono_literals;

using comm::testing::contains;
using comm::testing::what_of;

/// The paths for payloads that do not fit into a cell.
class AnySourceSendRecv : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ::setenv("COHORT_PLAN", GetParam(), 1); }
  void TearDown() override { ::unsetenv("COHORT_PLAN"); }
};
INSTANTIATE_TEST_SUITE_P(Plans, AnySourceSendRecv, ::testing::Values("", "cross=off"),
                         [](const auto& plan) { return std::string(*plan.param == '\0' ? "Pull" : "Fragments"); });

/// Waits until another thread has set `value` to `wanted`.
void await(const std::atomic<int>& value, int wanted) {
  const auto limit = std::chrono::steady_clock::now() + 60s;
  while (value.load() < wanted) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    std::this_thread::yield();
  }
}

TEST_P(AnySourceSendRecv, TakesEachMessageOnceInTheOrderOfItsSender) {
  constexpr int kEach = 30;
  for (const std::size_t count : {std::size_t{1}, std::size_t{5000}, std::size_t{200000}}) {
    for (const bool posted_before : {true, false}) {
      comm::testing::run_world(4, [&](Communicator comm) {
        if (comm.rank() != 0) {
          if (posted_before) comm.barrier().wait();
          std::vector<std::vector<std::int32_t>> sent;
          std::vector<Work> works;
          for (int i = 0; i < kEach; ++i) {
            sent.emplace_back(count, comm.rank() * 1000 + i);
            works.push_back(comm.send(std::span(sent.back()), 0, {.tag = 3}));
          }
          for (Work& work : works) work.wait();
          return comm.barrier().wait();
        }
        std::vector<std::vector<std::int32_t>> got(3 * kEach, std::vector<std::int32_t>(count));
        std::vector<Work> works;
        for (auto& each : got) {
          works.push_back(comm.recv(std::span(each), kAnySource, {.tag = 3}));
          if (!posted_before) works.back().wait();
        }
        if (posted_before) comm.barrier().wait();
        std::map<int, int> next;
        for (std::size_t i = 0; i < works.size(); ++i) {
          works[i].wait();
          ASSERT_TRUE(works[i].source().has_value());
          const int source = *works[i].source();
          const std::vector<std::int32_t> expected(count, source * 1000 + next[source]++);
          ASSERT_EQ(got[i], expected) << "from rank " << source;
        }
        EXPECT_EQ(next, (std::map<int, int>{{1, kEach}, {2, kEach}, {3, kEach}}));
        comm.barrier().wait();
      });
    }
  }
}

TEST_P(AnySourceSendRecv, AMessageGoesToTheReceiveThatWasStartedFirst) {
  for (const bool any_first : {true, false}) {
    for (const int sender : {1, 2, 3}) {
      comm::testing::run_world(4, [&](Communicator comm) {
        int first = 0, second = 0, other = 0;
        if (comm.rank() == 0) {
          Work wrong_tag = comm.recv(std::span(&other, 1), kAnySource, {.tag = 8});
          Work one = comm.recv(std::span(&first, 1), any_first ? kAnySource : sender);
          Work two = comm.recv(std::span(&second, 1), any_first ? sender : kAnySource);
          comm.barrier().wait();
          one.wait();
          two.wait();
          wrong_tag.wait();
          EXPECT_EQ(first, 10);
          EXPECT_EQ(second, 20);
          EXPECT_EQ((any_first ? one : two).source(), sender);
          EXPECT_FALSE((any_first ? two : one).source().has_value());
          EXPECT_EQ(wrong_tag.source(), 4 - sender == sender ? 3 : 4 - sender);
          EXPECT_EQ(other, 30);
        } else {
          comm.barrier().wait();
          const int ten = 10, twenty = 20, thirty = 30;
          if (comm.rank() == sender) {
            comm.send(std::span(&ten, 1), 0).wait();
            comm.send(std::span(&twenty, 1), 0).wait();
          } else if (comm.rank() == (4 - sender == sender ? 3 : 4 - sender)) {
            comm.send(std::span(&thirty, 1), 0, {.tag = 8}).wait();
          }
        }
        comm.barrier().wait();
      });
    }
  }
}

// The first message is received first, whatever other ranks send; it may be second if one of the two is remote.
TEST_P(AnySourceSendRecv, WhoHasSentFirstIsNotKeptWaiting) {
  comm::testing::run_world(3, [&](Communicator comm) {
    constexpr int kMany = 200;
    int value = 0;
    if (comm.rank() == 2) {
      comm.send(std::span(&value, 1), 0).wait();
      comm.send(std::span(&value, 1), 0, {.tag = 9}).wait();
    } else if (comm.rank() == 0) {
      comm.recv(std::span(&value, 1), 2, {.tag = 9}).wait();  // so everything sent before it has come
    }
    comm.barrier().wait();
    if (comm.rank() == 1) {
      for (int i = 0; i < kMany; ++i) comm.send(std::span(&value, 1), 0).wait();
      comm.send(std::span(&value, 1), 0, {.tag = 9}).wait();
    } else if (comm.rank() == 0) {
      comm.recv(std::span(&value, 1), 1, {.tag = 9}).wait();
      std::vector<int> sources;
      for (int i = 0; i < kMany + 1; ++i) {
        Work work = comm.recv(std::span(&value, 1), kAnySource);
        work.wait();
        sources.push_back(work.source().value_or(-1));
      }
      EXPECT_LE(std::find(sources.begin(), sources.end(), 2) - sources.begin(), 1);
      EXPECT_EQ(std::count(sources.begin(), sources.end(), 1), kMany);
    }
    comm.barrier().wait();
  });
}

TEST_P(AnySourceSendRecv, AMessageOfAnotherTypeIsRefusedOnBothSides) {
  comm::testing::run_world(3, [&](Communicator comm) {
    std::vector<float> data(100000);
    if (comm.rank() == 0) {
      Work work = comm.recv(Buffer(data.data(), 99999, DType::Float32), kAnySource);
      EXPECT_TRUE(contains(what_of([&] { work.wait(); }, ErrorCode::Mismatch),
                           "rank 2 sends float32[100000] (tag 0) to rank 0"));
    } else if (comm.rank() == 2) {
      Work work = comm.send(std::span(data), 0);
      EXPECT_TRUE(contains(what_of([&] { work.wait(); }, ErrorCode::Mismatch), "which receives float32[99999]"));
    }
    comm.barrier().wait();
  });
}

TEST_P(AnySourceSendRecv, TheDeadlineNamesAllWhoWereWaitedFor) {
  comm::testing::run_world(3, [&](Communicator comm) {
    int value = 0;
    if (comm.rank() != 0) {
      EXPECT_THROW(comm.barrier().wait(), Error);
      return;
    }
    Work work = comm.recv(std::span(&value, 1), kAnySource, {.tag = 4, .timeout = 100ms});
    const std::string text = what_of([&] { work.wait(); }, ErrorCode::Timeout);
    EXPECT_TRUE(contains(text, "recv(int32[1], from any rank, tag 4) timed out after 100 ms")) << text;
    EXPECT_TRUE(contains(text, "none of the ranks 1, 2 sent it")) << text;
    EXPECT_FALSE(work.source().has_value());
  });
}

TEST_P(AnySourceSendRecv, WhoHasLeftIsNotWaitedForAnyMore) {
  std::atomic<int> left{0};
  std::atomic<int> waited{0};
  comm::testing::run_world(4, [&](Communicator comm) {
    int value = comm.rank();
    for (int peer = 1; peer < comm.size(); ++peer) {  // between hosts: only a connected rank can be seen leaving
      if (comm.rank() == 0) comm.recv(std::span(&value, 1), peer, {.tag = 1}).wait();
      if (comm.rank() == peer) comm.send(std::span(&value, 1), 0, {.tag = 1}).wait();
    }
    if (comm.rank() == 0) {
      Work work = comm.recv(std::span(&value, 1), kAnySource);
      await(left, 1);
      EXPECT_FALSE(work.wait_for(150ms));  // longer than the interval between checks on the others
      waited = 1;
      work.wait();
      EXPECT_EQ(work.source(), 2);
      EXPECT_EQ(value, 2);
      Work nobody = comm.recv(std::span(&value, 1), kAnySource);
      const std::string text = what_of([&] { nobody.wait(); }, ErrorCode::PeerLost);
      EXPECT_TRUE(contains(text, "left the world")) << text;
    } else if (comm.rank() == 1) {
      comm = Communicator();
      left = 1;
    } else if (comm.rank() == 2) {
      await(waited, 1);
      comm.send(std::span(&value, 1), 0).wait();
    } else {
      await(waited, 1);
    }
  });
}

TEST_P(AnySourceSendRecv, InAGroupTheSourceIsTheGroups) {
  comm::testing::run_world(5, [&](Communicator comm) {
    const std::vector<int> ranks = {4, 0, 3};
    Communicator group = comm.group(ranks);
    if (group) {
      int value = comm.rank();
      if (group.rank() == 0) {
        for (int i = 0; i < 2; ++i) {
          Work work = group.recv(std::span(&value, 1), kAnySource);
          work.wait();
          ASSERT_TRUE(work.source().has_value());
          EXPECT_EQ(ranks[static_cast<std::size_t>(*work.source())], value);
        }
      } else {
        group.send(std::span(&value, 1), 0).wait();
      }
      group.barrier().wait();
    }
    comm.barrier().wait();
  });
}

TEST_P(AnySourceSendRecv, CallbacksAndWorksThatNobodyWaitsFor) {
  std::atomic<int> told{0};
  comm::testing::run_world(4, [&](Communicator comm) {
    std::vector<int> values(30);
    if (comm.rank() == 0) {
      std::vector<Work> works;
      for (int& value : values) {
        works.push_back(comm.recv(std::span(&value, 1), kAnySource));
        works.back().on_done([&] { told.fetch_add(1); });
      }
      works.clear();  // waits for them
      EXPECT_EQ(std::accumulate(values.begin(), values.end(), 0), 10 * (1 + 2 + 3));
    } else {
      for (int i = 0; i < 10; ++i) {
        const int value = comm.rank();
        comm.send(std::span(&value, 1), 0).wait();
      }
    }
    comm.barrier().wait();
  });
  await(told, 30);
}

TEST(AnySource, NobodyAndNonsenseAreRefused) {
  comm::testing::run_world(1, [](Communicator comm) {
    int value = 0;
    EXPECT_TRUE(
        contains(what_of([&] { comm.recv(std::span(&value, 1), kAnySource).wait(); }, ErrorCode::InvalidArgument),
                 "world of one"));
  });
  comm::testing::run_world(2, [](Communicator comm) {
    int value = 0;
    EXPECT_THROW(comm.send(std::span(&value, 1), kAnySource).wait(), Error);
    EXPECT_THROW(comm.recv(std::span(&value, 1), -1).wait(), Error);
    EXPECT_THROW(comm.recv(std::span(&value, 1), kAnySource, {.tag = -1}).wait(), Error);
    comm.barrier().wait();
  });
}

}  // namespace
}  // namespace cohort
