// Send and receive between ranks that are threads: matching, sizes, order, refusals, deadlines, and beside collectives.
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort {
namespace {

using namespace std::chrono_literals;

using comm::testing::contains;
using comm::testing::what_of;

/// Bytes that identify their message.
std::vector<std::uint8_t> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::uint8_t> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::uint8_t>((i * 2654435761U + seed * 97U) >> 7);
  return values;
}

constexpr std::size_t kSizes[] = {0,     1,     39,    40,    41,    47,    48,         49,     4096,
                                  16383, 16384, 16385, 65535, 65536, 65537, 524288 + 1, 3 << 20};

/// The paths for payloads that do not fit into a cell.
class SendRecv : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ::setenv("COHORT_PLAN", GetParam(), 1); }
  void TearDown() override { ::unsetenv("COHORT_PLAN"); }
};
INSTANTIATE_TEST_SUITE_P(Plans, SendRecv, ::testing::Values("", "cross=off"),
                         [](const auto& plan) { return std::string(*plan.param == '\0' ? "Pull" : "Fragments"); });

TEST_P(SendRecv, EverySizeBothWaysAtOnceAndInTurn) {
  for (const int size : {2, 5}) {
    comm::testing::run_world(size, [&](Communicator comm) {
      const int next = (comm.rank() + 1) % size;
      const int before = (comm.rank() + size - 1) % size;
      for (const std::size_t bytes : kSizes) {
        for (const bool sends_first : {true, false}) {
          const auto out = pattern(bytes, static_cast<unsigned>(comm.rank()));
          std::vector<std::uint8_t> in(bytes + 1, 0xEE);
          const std::span<std::uint8_t> room(in.data(), bytes);
          Work sent;
          Work received;
          if (sends_first) {
            sent = comm.send(std::span(out), next);
            received = comm.recv(room, before);
          } else {
            received = comm.recv(room, before);
            sent = comm.send(std::span(out), next);
          }
          received.wait();
          sent.wait();
          const auto expected = pattern(bytes, static_cast<unsigned>(before));
          ASSERT_TRUE(std::equal(expected.begin(), expected.end(), in.begin())) << bytes << " bytes";
          ASSERT_EQ(in[bytes], 0xEE);
        }
      }
    });
  }
}

TEST_P(SendRecv, EveryType) {
  comm::testing::run_world(2, [&](Communicator comm) {
    constexpr DType kTypes[] = {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16,  DType::Int8,
                                DType::Int16,   DType::Int32,   DType::Int64,   DType::UInt8,     DType::UInt16,
                                DType::UInt32,  DType::UInt64,  DType::Bool,    DType::Complex64, DType::Complex128};
    for (const DType dtype : kTypes) {
      for (const std::int64_t count : {1, 7, 3000}) {
        const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
        const auto expected = pattern(bytes, 5);
        std::vector<std::uint64_t> memory((bytes + 15) / 8);
        if (comm.rank() == 0) {
          std::memcpy(memory.data(), expected.data(), bytes);
          comm.send(ConstBuffer(memory.data(), count, dtype), 1).wait();
        } else {
          comm.recv(Buffer(memory.data(), count, dtype), 0).wait();
          EXPECT_EQ(std::memcmp(memory.data(), expected.data(), bytes), 0) << to_string(dtype);
        }
      }
    }
  });
}

TEST_P(SendRecv, TagsMeetInAnyOrderAndKeepTheirOwn) {
  comm::testing::run_world(2, [&](Communicator comm) {
    // More messages than a ring has cells, of every size, sent in the order of their tags and received in another.
    constexpr int kTags = 40;
    constexpr int kEach = 3;
    std::vector<std::pair<int, int>> order;
    for (int tag = 0; tag < kTags; ++tag) order.emplace_back(tag, 0);
    std::mt19937 random(7);
    const auto bytes_of = [](int tag, int each) {
      return kSizes[static_cast<std::size_t>(tag * 7 + each) % std::size(kSizes)] / (tag % 3 == 0 ? 1 : 8);
    };
    const auto seed_of = [](int tag, int each) { return static_cast<unsigned>(tag * kEach + each); };
    std::vector<Work> works;
    std::vector<std::vector<std::uint8_t>> memory;
    memory.reserve(kTags * kEach);
    if (comm.rank() == 0) {
      for (int each = 0; each < kEach; ++each) {
        for (int tag = 0; tag < kTags; ++tag) {
          memory.push_back(pattern(bytes_of(tag, each), seed_of(tag, each)));
          works.push_back(comm.send(std::span(memory.back()), 1, {.tag = tag}));
        }
      }
      for (Work& work : works) work.wait();
    } else {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::pair<int, int>> posted;
      for (int each = 0; each < kEach; ++each) {
        for (const auto& [tag, ignored] : order) {
          memory.emplace_back(bytes_of(tag, each));
          posted.emplace_back(tag, each);
          works.push_back(comm.recv(std::span(memory.back()), 0, {.tag = tag}));
        }
      }
      for (std::size_t i = works.size(); i-- > 0;) {
        works[i].wait();
        ASSERT_EQ(memory[i],
                  pattern(bytes_of(posted[i].first, posted[i].second), seed_of(posted[i].first, posted[i].second)))
            << "tag " << posted[i].first;
      }
    }
    comm.barrier().wait();
  });
}

TEST_P(SendRecv, ManyUnmetMessagesDoNotStandInTheWay) {
  comm::testing::run_world(2, [&](Communicator comm) {
    constexpr int kMany = 1000;  // more messages than are kept aside
    std::vector<int> values(kMany);
    std::vector<Work> works;
    int answer = comm.rank();
    if (comm.rank() == 0) {
      std::iota(values.begin(), values.end(), 0);
      for (int i = 0; i < kMany; ++i) works.push_back(comm.send(std::span(&values[static_cast<std::size_t>(i)], 1), 1));
      EXPECT_FALSE(works.back().done());  // it waits for its receive, in the sender's memory
      EXPECT_TRUE(works.front().done());
      comm.send(std::span(&answer, 1), 1, {.tag = 9}).wait();
      for (Work& work : works) work.wait();
    } else {
      comm.recv(std::span(&answer, 1), 0, {.tag = 9}).wait();
      EXPECT_EQ(answer, 0);
      for (int i = 0; i < kMany; ++i) {
        comm.recv(std::span(&values[static_cast<std::size_t>(i)], 1), 0).wait();
        ASSERT_EQ(values[static_cast<std::size_t>(i)], i);
      }
    }
  });
}

TEST_P(SendRecv, ProgressesUnattendedAndBesideCollectives) {
  comm::testing::run_world(3, [&](Communicator comm) {
    const int next = (comm.rank() + 1) % 3;
    const int before = (comm.rank() + 2) % 3;
    for (const std::size_t bytes : {std::size_t{100}, std::size_t{200000}, std::size_t{2000000}}) {
      // Posted before collectives and matched after them, by any thread.
      std::vector<std::uint8_t> in(bytes);
      const auto out = pattern(bytes, static_cast<unsigned>(comm.rank()));
      std::atomic<bool> called = false;
      Work received = comm.recv(std::span(in), before);
      received.on_done([&] { called = true; });
      std::vector<float> sum(30000, 1);
      Work reduced = comm.all_reduce(std::span(sum));
      comm.barrier().wait();
      EXPECT_FALSE(received.done());
      comm.barrier().wait();
      Work sent = comm.send(std::span(out), next);
      Work again = comm.all_reduce(std::span(sum));
      const auto give_up = std::chrono::steady_clock::now() + 20s;
      while (!called && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(100us);
      ASSERT_TRUE(called);
      EXPECT_TRUE(received.done());
      again.wait();
      reduced.wait();
      sent.wait();
      EXPECT_EQ(in, pattern(bytes, static_cast<unsigned>(before)));
      EXPECT_EQ(sum[29999], 9.0F);
    }
  });
}

TEST_P(SendRecv, RandomTrafficAmongAllWithCollectivesBetween) {
  comm::testing::run_world(4, [&](Communicator comm) {
    std::mt19937 shared(11);  // the same decisions on all ranks
    for (int round = 0; round < 30; ++round) {
      std::vector<Work> works;
      std::vector<std::vector<std::uint8_t>> memory;
      std::vector<std::pair<std::size_t, std::vector<std::uint8_t>>> expected;
      memory.reserve(64);
      for (int i = 0; i < 40; ++i) {
        const int from = static_cast<int>(shared() % 4);
        const int to = (from + 1 + static_cast<int>(shared() % 3)) % 4;
        const int tag = static_cast<int>(shared() % 3);
        const std::size_t bytes = shared() % (shared() % 8 == 0 ? 300000 : 200);
        const unsigned seed = static_cast<unsigned>(round * 100 + i);
        if (comm.rank() == from) {
          memory.push_back(pattern(bytes, seed));
          works.push_back(comm.send(std::span(memory.back()), to, {.tag = tag}));
        } else if (comm.rank() == to) {
          memory.emplace_back(bytes);
          expected.emplace_back(memory.size() - 1, pattern(bytes, seed));
          works.push_back(comm.recv(std::span(memory.back()), from, {.tag = tag}));
        }
        if (i % 13 == 0) {
          std::array<int, 2> values{1, comm.rank()};
          comm.all_reduce(std::span(values)).wait();
          ASSERT_EQ(values[0], 4);
        }
      }
      for (Work& work : works) work.wait();
      for (const auto& [index, bytes] : expected) ASSERT_EQ(memory[index], bytes) << "round " << round;
    }
  });
}

TEST_P(SendRecv, MismatchIsRefusedOnBothSidesAndTheWorldGoesOn) {
  comm::testing::run_world(2, [&](Communicator comm) {
    std::vector<float> floats(100000);
    std::vector<double> doubles(100000);
    struct Clash {
      std::int64_t sent, received;
      bool doubled;
    };
    for (const bool late_receiver : {true, false}) {
      for (const Clash& clash : {Clash{4, 5, false}, Clash{4, 4, true}, Clash{0, 1, false}, Clash{30000, 30001, false},
                                 Clash{30000, 4, false}, Clash{4, 30000, false}, Clash{30000, 30000, true}}) {
        const std::string named = "rank 0 sends float32[" + std::to_string(clash.sent) +
                                  "] (tag 3) to rank 1, which receives " + (clash.doubled ? "float64[" : "float32[") +
                                  std::to_string(clash.received) + "]";
        int token = 0;
        if (comm.rank() == 0) {
          if (!late_receiver) std::this_thread::sleep_for(3ms);
          Work sent = comm.send(ConstBuffer(floats.data(), clash.sent, DType::Float32), 1, {.tag = 3});
          std::string text;
          if (clash.sent <= 4) {  // over before it was refused: the next operation with that rank reports it
            sent.wait();
            text = what_of([&] { comm.recv(std::span(&token, 1), 1).wait(); }, ErrorCode::Mismatch);
            EXPECT_TRUE(contains(text, "was itself carried out")) << text;
          } else {
            text = what_of([&] { sent.wait(); }, ErrorCode::Mismatch);
            comm.recv(std::span(&token, 1), 1).wait();
          }
          EXPECT_TRUE(contains(text, named)) << text;
          EXPECT_EQ(token, 42);
        } else {
          if (late_receiver) std::this_thread::sleep_for(3ms);
          floats[0] = -1;
          const Buffer room = clash.doubled ? Buffer(doubles.data(), clash.received, DType::Float64)
                                            : Buffer(floats.data(), clash.received, DType::Float32);
          const std::string text = what_of([&] { comm.recv(room, 0, {.tag = 3}).wait(); }, ErrorCode::Mismatch);
          EXPECT_TRUE(contains(text, named)) << text;
          EXPECT_EQ(floats[0], -1.0F);  // nothing was delivered
          token = 42;
          comm.send(std::span(&token, 1), 0).wait();
        }
        comm.barrier().wait();
      }
    }
  });
}

TEST_P(SendRecv, ASmallSendThatWasRefusedIsToldOfByTheNextOneWhichArrives) {
  comm::testing::run_world(2, [&](Communicator comm) {
    const std::array<float, 4> small{1, 2, 3, 4};
    std::vector<float> large(30000, 5);
    for (const bool next_is_small : {true, false}) {
      const std::span<const float> next = next_is_small ? std::span<const float>(small) : std::span<const float>(large);
      if (comm.rank() == 0) {
        comm.send(std::span(small), 1).wait();  // its send is over, whatever becomes of the message
        comm.barrier().wait();                  // no collective reports it
        const std::string text = what_of([&] { comm.send(next, 1).wait(); }, ErrorCode::Mismatch);
        EXPECT_TRUE(contains(text, "rank 0 sends float32[4] (tag 0) to rank 1, which receives float32[3]")) << text;
        EXPECT_TRUE(contains(text, "send(float32[" + std::to_string(next.size()) +
                                       "], to rank 1, tag 0) reports it, "
                                       "which was itself carried out"))
            << text;
        comm.send(std::span(small), 1).wait();  // reported once
      } else {
        std::vector<float> room(next.size());
        what_of([&] { comm.recv(std::span(room).first(3), 0).wait(); }, ErrorCode::Mismatch);
        comm.barrier().wait();
        comm.recv(std::span(room), 0).wait();
        EXPECT_TRUE(std::equal(room.begin(), room.end(), next.begin()));
        comm.recv(std::span(room).first(4), 0).wait();
      }
    }
  });
}

TEST_P(SendRecv, OneselfAndRanksThatDoNotExistAreRefusedAndTheWorldGoesOn) {
  for (const int size : {1, 2}) {
    comm::testing::run_world(size, [&](Communicator comm) {
      int value = comm.rank();
      const auto refused = [&](int peer, const SendOptions& options, const std::string& why) {
        for (const bool sends : {true, false}) {
          const std::string text = what_of(
              [&] {
                if (sends) {
                  comm.send(std::span(&value, 1), peer, options).wait();
                } else {
                  comm.recv(std::span(&value, 1), peer, options).wait();
                }
              },
              ErrorCode::InvalidArgument);
          EXPECT_TRUE(contains(text, sends ? "send" : "recv") && contains(text, why)) << text;
        }
      };
      refused(comm.rank(), {}, "the peer is this rank itself");
      refused(size, {}, "the peer is " + std::to_string(size) + " in a world of " + std::to_string(size));
      refused(-1, {}, "the peer is -1");
      if (size > 1) refused(1 - comm.rank(), {.tag = -1}, "the tag is -1");
      comm.barrier().wait();
      if (size > 1) {
        const int own = comm.rank();
        Work sent = comm.send(std::span(&own, 1), 1 - own);
        comm.recv(std::span(&value, 1), 1 - own).wait();
        sent.wait();
        EXPECT_EQ(value, 1 - own);
      }
      // A group of one is a world of one.
      Communicator alone = comm.split({.color = comm.rank()});
      what_of([&] { alone.send(std::span(&value, 1), 0).wait(); }, ErrorCode::InvalidArgument);
      alone.barrier().wait();
    });
  }
}

TEST_P(SendRecv, BetweenRanksOfGroups) {
  comm::testing::run_world(4, [&](Communicator comm) {
    Communicator half = comm.split({.color = comm.rank() % 2});
    const int peer = 1 - half.rank();
    for (const std::size_t count : {std::size_t{2}, std::size_t{50000}}) {
      std::vector<int> out(count, comm.rank());
      std::vector<int> in(count);
      Work sent = half.send(std::span(out), peer);
      half.recv(std::span(in), peer).wait();
      sent.wait();
      EXPECT_EQ(in, std::vector<int>(count, (comm.rank() + 2) % 4));
    }
  });
}

TEST_P(SendRecv, WorksOutliveTheirCommunicator) {
  std::vector<Communicator> world = comm::testing::form_world(2);
  const auto out = pattern(1000000, 1);
  std::vector<std::uint8_t> in(out.size());
  std::jthread sender([&, comm = std::move(world[0])]() mutable {
    Work work = comm.send(std::span(out), 1);
    comm = Communicator();
    work.wait();
  });
  std::this_thread::sleep_for(5ms);
  Work received = world[1].recv(std::span(in), 0);
  world[1] = Communicator();
  received.wait();
  sender.join();
  EXPECT_EQ(in, out);
}

TEST(SendRecvEnds, WhatWasSentBeforeLeavingIsReceived) {
  std::vector<Communicator> world = comm::testing::form_world(2);
  const int sent = 17;
  int got = 0;
  world[0].send(std::span(&sent, 1), 1).wait();
  world[0] = Communicator();
  world[1].recv(std::span(&got, 1), 0).wait();
  EXPECT_EQ(got, 17);
  const std::string text = what_of([&] { world[1].recv(std::span(&got, 1), 0).wait(); }, ErrorCode::PeerLost);
  EXPECT_TRUE(contains(text, "recv(int32[1], from rank 0, tag 0)") && contains(text, "left the world")) << text;
}

TEST(SendRecvEnds, DeadlinesNameWhoDidNotComeAndForWhat) {
  for (const bool attended : {true, false}) {
    std::vector<Communicator> world = comm::testing::form_world(2);
    int value = 0;
    // Waits until something has come over their connection, so that the next message arrives at once.
    world[0].send(std::span(&value, 1), 1, {.tag = 8}).wait();
    world[1].recv(std::span(&value, 1), 0, {.tag = 8}).wait();
    world[0].send(std::span(&value, 1), 1, {.tag = 8}).wait();
    const auto begin = std::chrono::steady_clock::now();
    Work work = world[1].recv(std::span(&value, 1), 0, {.tag = 7, .timeout = 100ms});
    EXPECT_FALSE(work.wait_for(1ms));
    while (!attended && !work.done() && std::chrono::steady_clock::now() - begin < 20s) {
      std::this_thread::sleep_for(1ms);
    }
    const std::string text = what_of([&] { work.wait(); }, ErrorCode::Timeout);
    EXPECT_GE(std::chrono::steady_clock::now() - begin, 100ms);
    EXPECT_TRUE(contains(text, "recv(int32[1], from rank 0, tag 7) timed out after 100 ms")) << text;
    EXPECT_TRUE(contains(text, "rank 0 did not send it; 1 of its messages wait to be received")) << text;
    EXPECT_TRUE(contains(text, "int32[1] with tag 8")) << text;
    what_of([&] { world[0].send(std::span(&value, 1), 1).wait(); }, ErrorCode::Aborted);  // it was given up
    what_of([&] { world[1].barrier().wait(); }, ErrorCode::Timeout);
  }
  std::vector<Communicator> world = comm::testing::form_world(2);
  std::vector<int> large(100000);
  const std::string text =
      what_of([&] { world[0].send(std::span(large), 1, {.timeout = 60ms}).wait(); }, ErrorCode::Timeout);
  EXPECT_TRUE(contains(text, "send(int32[100000], to rank 1, tag 0) timed out after 60 ms")) << text;
  EXPECT_TRUE(contains(text, "rank 1 did not receive it")) << text;
}

TEST(SendRecvEnds, AbortReachesThoseWhoWait) {
  std::vector<Communicator> world = comm::testing::form_world(3);
  std::array<std::string, 2> told;
  {
    std::jthread receiver([&] {
      int value = 0;
      told[0] = what_of([&] { world[0].recv(std::span(&value, 1), 2).wait(); }, ErrorCode::Aborted);
    });
    std::jthread sender([&] {
      std::vector<float> values(1000000);
      told[1] = what_of([&] { world[1].send(std::span(values), 2).wait(); }, ErrorCode::Aborted);
    });
    std::this_thread::sleep_for(50ms);
    world[2].abort("the loss is NaN");
  }
  for (const std::string& text : told) EXPECT_TRUE(contains(text, "the loss is NaN")) << text;
}

TEST(SendRecvObserver, SeesBothSides) {
  comm::testing::run_world(2, [](Communicator comm) {
    comm::testing::Recorder recorder;
    comm.set_observer(&recorder);
    std::vector<float> values(100000);
    for (const std::size_t count : {std::size_t{2}, values.size()}) {
      const std::span<float> data(values.data(), count);
      if (comm.rank() == 0) {
        comm.send(data, 1).wait();
      } else {
        comm.recv(data, 0).wait();
      }
    }
    comm.set_observer(nullptr);
    const std::lock_guard lock(recorder.mutex);
    ASSERT_EQ(recorder.events.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
      const CollectiveEvent& event = recorder.events[i];
      EXPECT_EQ(event.operation, comm.rank() == 0 ? "send" : "recv");
      EXPECT_EQ(event.sequence, i + 1);
      EXPECT_EQ(event.bytes, i == 0 ? 8u : 400000u);
      EXPECT_LE(event.called, event.begun);
      EXPECT_LE(event.begun, event.ended);
      EXPECT_LE(event.waited, event.ended - event.begun);
      EXPECT_FALSE(event.failed);
    }
  });
}

}  // namespace
}  // namespace cohort
