// Guarantees of a communicator other than its results: refusals, deadlines, the same bits, what its observer sees.
#include "comm/kernels/codecs.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <gtest/gtest.h>

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace cohort {
namespace {

using namespace std::chrono_literals;

using comm::testing::contains;
using comm::testing::floats;
using comm::testing::what_of;

// --- refusals ---

TEST(Mismatch, OfEveryKindIsRefusedOnEveryRankByNameAndTheWorldGoesOn) {
  using Call = std::function<void(Communicator&)>;
  std::array<float, 64> f{};
  std::array<double, 64> d{};
  struct Clash {
    Call odd, others;
    std::string named_odd, named_others;
  };
  const auto reduce = [](auto values, AllReduceOptions options = {}) {
    return
        [=](Communicator& comm) mutable { comm.all_reduce(std::span(values.data(), values.size()), options).wait(); };
  };
  std::array<float, 63> shorter{};
  std::vector<float> big(100000);
  std::vector<float> bigger(100001);
  const std::vector<Clash> clashes = {
      {reduce(f), reduce(d), "all_reduce(float32[64], sum)", "all_reduce(float64[64], sum)"},
      {reduce(shorter), reduce(f), "all_reduce(float32[63], sum)", "all_reduce(float32[64], sum)"},
      {reduce(big), reduce(bigger), "all_reduce(float32[100000], sum)", "all_reduce(float32[100001], sum)"},
      {reduce(f), reduce(big), "all_reduce(float32[64], sum)", "all_reduce(float32[100000], sum)"},
      {reduce(f, {.op = ReduceOp::Max}), reduce(f), "all_reduce(float32[64], max)", "all_reduce(float32[64], sum)"},
      {reduce(f, {.op = ReduceOp::Average, .weight = 2}), reduce(f, {.op = ReduceOp::Average}),
       "all_reduce(float32[64], average, weighted)", "all_reduce(float32[64], average)"},
      {[](Communicator& comm) { comm.barrier().wait(); }, reduce(f), "barrier()", "all_reduce(float32[64], sum)"},
      {[f](Communicator& comm) mutable { comm.broadcast(std::span(f), {.root = 0}).wait(); },
       [f](Communicator& comm) mutable { comm.broadcast(std::span(f), {.root = 1}).wait(); },
       "broadcast(float32[64], root 0)", "broadcast(float32[64], root 1)"},
      {[f](Communicator& comm) mutable {
         std::vector<float> all(f.size() * 3);
         comm.all_gather(std::span(f), std::span(all)).wait();
       },
       [f](Communicator& comm) mutable {
         std::vector<float> all(f.size() * 3);
         comm.reduce_scatter(std::span(all), std::span(f)).wait();
       },
       "all_gather(float32[64])", "reduce_scatter(float32[64], sum)"},
      {[](Communicator& comm) {
         std::vector<std::int32_t> part(5);
         std::vector<std::int32_t> all(15);
         comm.all_gather(std::span(part), std::span(all)).wait();
       },
       [](Communicator& comm) {
         std::vector<std::int32_t> part(6);
         std::vector<std::int32_t> all(18);
         comm.all_gather(std::span(part), std::span(all)).wait();
       },
       "all_gather(int32[5])", "all_gather(int32[6])"},
  };
  comm::testing::run_world(3, [&](Communicator comm) {
    std::uint64_t operation = 0;
    for (const Clash& clash : clashes) {
      for (int odd = 0; odd < 3; ++odd) {
        ++operation;
        const std::string text =
            what_of([&] { (comm.rank() == odd ? clash.odd : clash.others)(comm); }, ErrorCode::Mismatch);
        EXPECT_TRUE(contains(text, clash.named_odd)) << text;
        EXPECT_TRUE(contains(text, clash.named_others)) << text;
        EXPECT_TRUE(contains(text, "rank " + std::to_string(odd) + " brought " + clash.named_odd)) << text;
        EXPECT_TRUE(contains(text, "operation " + std::to_string(operation))) << text;
        std::array<int, 3> still_works{1, 2, 3};
        comm.all_reduce(std::span(still_works)).wait();
        ++operation;
        EXPECT_EQ(still_works, (std::array<int, 3>{3, 6, 9}));
      }
    }
  });
}

TEST(Mismatch, DeliversNothing) {
  comm::testing::run_world(2, [](Communicator comm) {
    Memory memory = comm.allocate(400000);
    std::fill(floats(memory).begin(), floats(memory).end(), 5.0F);
    const std::size_t count = comm.rank() == 0 ? 90000 : 90001;
    what_of([&] { comm.all_reduce(floats(memory).first(count)).wait(); }, ErrorCode::Mismatch);
    for (const float value : floats(memory)) ASSERT_EQ(value, 5.0F);
  });
}

TEST(Arguments, WithoutMeaningAreRefusedAtOnce) {
  comm::testing::run_world(2, [](Communicator comm) {
    std::array<float, 8> a{};
    std::array<int, 8> i{};
    const auto invalid = [&](const std::function<void()>& body) { what_of(body, ErrorCode::InvalidArgument); };
    float* const null = nullptr;
    invalid([&] { comm.all_reduce(Buffer(a.data(), -1, DType::Float32)).wait(); });
    invalid([&] { comm.all_reduce(Buffer(null, 3, DType::Float32)).wait(); });
    invalid([&] { comm.all_reduce(Buffer(a.data(), 3, static_cast<DType>(99))).wait(); });
    invalid(
        [&] { comm.all_reduce(Buffer(a.data(), std::numeric_limits<std::int64_t>::max(), DType::Float64)).wait(); });
    invalid([&] { comm.all_reduce(Buffer(reinterpret_cast<char*>(a.data()) + 1, 3, DType::Float32)).wait(); });
    invalid([&] { comm.all_reduce(std::span(a), {.op = ReduceOp::Sum, .weight = 1}).wait(); });
    invalid([&] { comm.all_reduce(std::span(i), {.op = ReduceOp::Average, .weight = 1}).wait(); });
    for (const double weight : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      invalid([&] { comm.all_reduce(std::span(a), {.op = ReduceOp::Average, .weight = weight}).wait(); });
    }
    invalid([&] { comm.all_reduce(std::span(a), {.timeout = 0ms}).wait(); });
    invalid([&] {
      comm.all_reduce(ConstBuffer(a.data(), 4, DType::Float32), Buffer(a.data() + 2, 4, DType::Float32)).wait();
    });
    invalid(
        [&] { comm.all_reduce(ConstBuffer(a.data(), 4, DType::Float32), Buffer(i.data(), 4, DType::Int32)).wait(); });
    invalid([&] {
      comm.all_reduce(ConstBuffer(a.data(), 4, DType::Float32), Buffer(a.data() + 4, 3, DType::Float32)).wait();
    });
    invalid([&] { comm.broadcast(std::span(a), {.root = 2}).wait(); });
    invalid([&] { comm.broadcast(std::span(a), {.root = -1}).wait(); });
    invalid([&] { comm.reduce_scatter(std::span(a), std::span(a).first(3)).wait(); });
    invalid([&] { comm.reduce_scatter(std::span(a), std::span(a).subspan(2, 4)).wait(); });
    invalid([&] { comm.all_gather(std::span(a).first(3), std::span(a)).wait(); });
    invalid([&] { comm.all_gather(std::span(a).subspan(1, 4), std::span(a)).wait(); });
    comm.barrier().wait();  // nothing of that has reached the others
  });
  EXPECT_THROW(Communicator().barrier().wait(), Error);
  EXPECT_FALSE(Communicator());
}

// --- how worlds end ---

TEST(Deadline, NamesWhoDidNotComeAndForWhat) {
  std::vector<Communicator> world = comm::testing::form_world(3);
  std::array<std::string, 2> told;
  {
    std::array<std::jthread, 2> threads;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      threads[rank] = std::jthread([&, rank] {
        std::vector<float> values(rank == 0 ? 5000 : 5000);
        told[rank] =
            what_of([&] { world[rank].all_reduce(std::span(values), {.timeout = 150ms}).wait(); }, ErrorCode::Timeout);
      });
    }
  }
  for (const std::string& text : told) {
    EXPECT_TRUE(contains(text, "all_reduce(float32[5000], sum)")) << text;
    EXPECT_TRUE(contains(text, "rank 2 did not come")) << text;
    EXPECT_TRUE(contains(text, "operation 1")) << text;
  }
  // The rank that was given up learns so when it comes, and so does every rank that goes on.
  what_of([&] { world[2].barrier().wait(); }, ErrorCode::Aborted);
  what_of([&] { world[0].barrier().wait(); }, ErrorCode::Timeout);
}

TEST(Abort, ReachesThoseWhoWaitInTheMiddleOfSomething) {
  std::vector<Communicator> world = comm::testing::form_world(3);
  std::array<std::string, 2> told;
  const auto begin = std::chrono::steady_clock::now();
  {
    std::array<std::jthread, 2> threads;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      threads[rank] = std::jthread([&, rank] {
        std::vector<float> values(1000000);
        told[rank] = what_of([&] { world[rank].all_reduce(std::span(values)).wait(); }, ErrorCode::Aborted);
      });
    }
    std::this_thread::sleep_for(100ms);
    world[2].abort("the loss is NaN");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
  for (const std::string& text : told) {
    EXPECT_TRUE(contains(text, "the loss is NaN") && contains(text, "rank 2")) << text;
  }
}

// A rank mostly learns in this manner about events between two of its operations.
TEST(Aborting, WhatIsStartedAfterwardsIsNamedItself) {
  for (const int size : {2, 4}) {
    std::vector<Communicator> world = comm::testing::form_world(size);
    {
      std::vector<std::jthread> threads;
      for (Communicator& one : world) threads.emplace_back([&one] { one.barrier().wait(); });
    }
    world[0].abort("for a reason");
    std::this_thread::sleep_for(100ms);
    std::vector<float> values(100000);
    try {
      world.back().broadcast(std::span(values)).wait();
      ADD_FAILURE() << "the world has ended";
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), "broadcast(float32[100000]")) << error.what();
      EXPECT_TRUE(contains(error.context().operation, "broadcast")) << error.context().operation;
      EXPECT_EQ(error.context().sequence, 2U) << error.what();
    }
    const std::string text = what_of([&] { world.back().join(); }, ErrorCode::Aborted);
    EXPECT_TRUE(contains(text, "join")) << text;
  }
}

TEST(Leaving, WhileOthersWaitIsALostPeer) {
  std::vector<Communicator> world = comm::testing::form_world(2);
  std::jthread other([comm = std::move(world[1])]() mutable {
    comm.barrier().wait();
    comm = Communicator();
  });
  world[0].barrier().wait();
  const std::string text = what_of([&] { world[0].barrier().wait(); }, ErrorCode::PeerLost);
  EXPECT_TRUE(contains(text, "rank 1") && contains(text, "left the world") && contains(text, "operation 2")) << text;
}

TEST(Leaving, AtTheEndInAnyOrderIsQuiet) {
  for (int round = 0; round < 20; ++round) {
    comm::testing::run_world(4, [&](Communicator comm) {
      std::vector<float> values(20000, 1);
      for (int i = 0; i < 3; ++i) comm.all_reduce(std::span(values)).wait();
      EXPECT_EQ(values[0], 64.0F);
    });
  }
}

// --- the same bits ---

TEST(Bits, AreTheSameWhateverTheTiming) {
  constexpr std::size_t kCount = 3001;
  for (const bool arena : {true, false}) {
    comm::testing::run_world(3, [&](Communicator comm) {
      std::mt19937 random(static_cast<unsigned>(comm.rank()));
      std::uniform_real_distribution<float> values(-1, 1);
      std::vector<float> own(kCount);
      for (float& value : own) value = values(random) * std::exp2(static_cast<float>(random() % 40));
      Memory memory = comm.allocate(kCount * sizeof(float));
      std::vector<float> heap(kCount);
      const std::span<float> data = arena ? floats(memory) : std::span<float>(heap);
      std::vector<float> first;
      for (int call = 0; call < 1500; ++call) {
        std::copy(own.begin(), own.end(), data.begin());
        if (random() % 16 == 0) std::this_thread::yield();
        if (random() % 512 == 0) std::this_thread::sleep_for(1ms);
        comm.all_reduce(data).wait();
        if (call == 0) first.assign(data.begin(), data.end());
        ASSERT_EQ(std::memcmp(first.data(), data.data(), kCount * sizeof(float)), 0) << "call " << call;
      }
      // The bits are the same at another position, in another kind of memory, and in pieces.
      std::vector<float> pieces(own);
      for (std::size_t begin = 0; begin < kCount; begin += 700) {
        comm.all_reduce(std::span(pieces).subspan(begin, std::min<std::size_t>(700, kCount - begin))).wait();
      }
      EXPECT_EQ(std::memcmp(first.data(), pieces.data(), kCount * sizeof(float)), 0);
    });
  }
}

TEST(Observers, SeeEveryOperationAndWhetherItWasCopied) {
  comm::testing::run_world(2, [](Communicator comm) {
    comm::testing::Recorder recorder;
    comm.set_observer(&recorder);
    Memory memory = comm.allocate(400000);
    std::vector<float> heap(100000);
    comm.all_reduce(floats(memory)).wait();
    comm.all_reduce(std::span(heap)).wait();
    comm.all_reduce(comm.rank() == 0 ? floats(memory) : std::span<float>(heap)).wait();
    comm.barrier().wait();
    what_of([&] { comm.all_reduce(floats(memory).first(comm.rank() == 0 ? 1 : 2)).wait(); }, ErrorCode::Mismatch);
    comm.barrier().wait();
    comm.set_observer(nullptr);
    const std::lock_guard lock(recorder.mutex);
    ASSERT_EQ(recorder.events.size(), 6u);
    EXPECT_TRUE(recorder.events[0].zero_copy);
    EXPECT_FALSE(recorder.events[1].zero_copy);
    EXPECT_FALSE(recorder.events[2].zero_copy);
    EXPECT_TRUE(recorder.events[4].failed);
    for (std::size_t i = 0; i < 6; ++i) {
      const CollectiveEvent& event = recorder.events[i];
      EXPECT_EQ(event.sequence, i + 1);
      EXPECT_EQ(event.operation, i == 3 || i == 5 ? "barrier" : "all_reduce");
      EXPECT_LE(event.called, event.begun);
      EXPECT_LE(event.begun, event.ended);
      EXPECT_LE(event.waited, event.ended - event.begun);
    }
    EXPECT_EQ(recorder.events[0].bytes, 400000u);
  });
}

}  // namespace

}  // namespace cohort

namespace cohort::comm::testing {
namespace {

// float32 that travels as bfloat16 between hosts: each host's sum is rounded, and with more than two hosts the result
// as well, whatever the size and the path. On one host nothing is rounded. Runs over fake hosts too (CMakeLists.txt).

std::vector<float> brought_by(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) * 7919 + static_cast<unsigned>(count));
  std::vector<float> values(count);
  for (float& value : values) value = (static_cast<float>(random()) / 4294967296.0F - 0.5F) * 20;
  return values;
}

constexpr WireFormat kFormats[] = {WireFormat::BFloat16, WireFormat::Int8, WireFormat::Int4};

std::vector<float> expected(WireFormat format, int size, std::size_t count, bool average, double prescale) {
  std::vector<int> hosts = Worlds::chosen().hosts(size);
  hosts.resize(static_cast<std::size_t>(size));
  const int last = *std::max_element(hosts.begin(), hosts.end());
  std::vector<float> total(count);
  for (int host = 0; host <= last; ++host) {
    std::vector<float> sum;
    for (int rank = 0; rank < size; ++rank) {
      if (hosts[static_cast<std::size_t>(rank)] != host) continue;
      std::vector<float> values = brought_by(rank, count);
      for (float& value : values) value *= static_cast<float>(prescale);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
      if (sum.empty()) sum = values;
    }
    if (last > 0) round_trip(format, sum.data(), count);
    for (std::size_t i = 0; i < count; ++i) total[i] = host == 0 ? sum[i] : total[i] + sum[i];
  }
  for (float& value : total) value = average ? value / static_cast<float>(size) : value;
  if (last > 1) round_trip(format, total.data(), count);
  return total;
}

TEST(WireFormats, RoundsWhatTravelsAndNothingElse) {
  for (const int size : {2, 3, 4, 6}) {
    run_world(size, [&](Communicator comm) {
      for (const std::size_t count : {1U, 17U, 1000U, 3000U, 9000U, 40000U, 300001U}) {
        for (const WireFormat format : kFormats) {
          const bool average = count % 2 == 0 || format == WireFormat::BFloat16;
          const double prescale = average ? 0.5 : 1;
          AllReduceOptions options{.prescale = prescale, .wire_format = format};
          if (average) options.op = ReduceOp::Average;
          const std::vector<float> own = brought_by(comm.rank(), count);
          const std::vector<float> wanted = expected(format, size, count, average, prescale);
          std::vector<float> in_place = own;
          comm.all_reduce(std::span(in_place), options).wait();
          std::vector<float> apart(count);
          comm.all_reduce(std::span(own), std::span(apart), options).wait();
          ASSERT_EQ(std::memcmp(in_place.data(), wanted.data(), count * sizeof(float)), 0)
              << count << " elements, " << size << " ranks" << (average ? ", average, " : ", ") << to_string(format);
          ASSERT_EQ(std::memcmp(apart.data(), wanted.data(), count * sizeof(float)), 0) << count;
        }
      }
    });
  }
}

// Small operations of a group are fused, and weighted ones that leave out a rank take another path.
TEST(WireFormats, IsTheSameWhateverTheWay) {
  for (const WireFormat format : kFormats) {
    run_world(4, [&](Communicator comm) {
      const AllReduceOptions options{.wire_format = format};
      std::vector<std::vector<float>> alone, grouped;
      std::vector<Buffer> buffers;
      for (const std::size_t count : {5U, 700U, 20000U}) alone.push_back(brought_by(comm.rank(), count));
      grouped = alone;
      for (auto& one : grouped) buffers.emplace_back(std::span(one));
      for (auto& one : alone) comm.all_reduce(std::span(one), options).wait();
      comm.all_reduce(std::span<const Buffer>(buffers), options).wait();
      EXPECT_EQ(alone, grouped);

      std::vector<float> left_out = brought_by(comm.rank(), 30000);
      std::vector<float> zero = comm.rank() == 3 ? std::vector<float>(30000) : left_out;
      comm.all_reduce(std::span(left_out),
                      {.op = ReduceOp::Average, .weight = comm.rank() == 3 ? 0 : 1, .wire_format = format})
          .wait();
      comm.all_reduce(std::span(zero), {.postscale = 1, .wire_format = format}).wait();
      const std::vector<int> hosts = Worlds::chosen().hosts(4);
      if (hosts.empty() ||
          *std::max_element(hosts.begin(), hosts.end()) < 2) {  // else the sum is rounded before it is divided
        for (float& value : zero) value /= 3;
        EXPECT_EQ(left_out, zero);
      }
    });
  }
}

// Over many steps the results add up to the inputs, but for the residuals that the ranks still have.
TEST(WireFormats, AResidualHasWhatRoundingLoses) {
  for (const int size : {2, 3, 4, 6}) {
    run_world(size, [&](Communicator comm) {
      for (const std::size_t count : {300U, 20000U, 300001U}) {
        for (const WireFormat format : {WireFormat::Int8, WireFormat::Int4}) {
          const bool average = format != WireFormat::Int8;
          std::vector<float> residual(count);
          AllReduceOptions options{.op = average ? ReduceOp::Average : ReduceOp::Sum,
                                   .postscale = count == 300U ? 0.5 : 1,
                                   .wire_format = format,
                                   .residual = residual.data()};
          const std::vector<float> own = brought_by(comm.rank(), count);
          std::vector<double> received(count), exact(count);
          for (int step = 0; step < 6; ++step) {
            // Unequal weights are applied in the hosts' sums, equal weights by the divisor afterwards.
            if (average && count != 300U) options.weight = step % 2 == 0 ? 1 : 1 + comm.rank();
            std::vector<float> values = own;
            std::vector<double> whole(own.begin(), own.end());
            comm.all_reduce(std::span(whole),
                            {.op = options.op, .weight = options.weight, .postscale = options.postscale})
                .wait();
            for (std::size_t i = 0; i < count; ++i) exact[i] += whole[i];
            comm.all_reduce(std::span(values), options).wait();
            std::vector<float> others = values;
            comm.broadcast(std::span(others)).wait();
            ASSERT_EQ(std::memcmp(others.data(), values.data(), count * sizeof(float)), 0) << to_string(format);
            for (std::size_t i = 0; i < count; ++i) received[i] += values[i];
          }
          std::vector<double> left(residual.begin(), residual.end());
          comm.all_reduce(std::span(left)).wait();
          bool rounded = false;
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_NEAR(received[i] + left[i], exact[i], 2e-4 * size) << to_string(format) << " at " << i;
            rounded = rounded || left[i] != 0;
          }
          EXPECT_EQ(rounded, !Worlds::chosen().hosts(size).empty());
        }
      }
    });
  }
}

TEST(WireFormats, HasToBeTheSameOnAllRanks) {
  run_world(3, [](Communicator comm) {
    std::vector<float> values(50000);
    AllReduceOptions options;
    if (comm.rank() == 1) options.wire_format = WireFormat::BFloat16;
    const std::string text = what_of([&] { comm.all_reduce(std::span(values), options).wait(); }, ErrorCode::Mismatch);
    EXPECT_TRUE(contains(text, "all_reduce(float32[50000], sum, bfloat16 between hosts)")) << text;
    comm.all_reduce(std::span(values), {.wire_format = WireFormat::BFloat16}).wait();
  });
}

TEST(WireFormats, IsRefusedWhereItHasNoMeaning) {
  run_world(2, [](Communicator comm) {
    std::vector<float> floats(4);
    std::vector<double> doubles(4);
    const auto refused = [&](auto& values, const AllReduceOptions& options) {
      return what_of([&] { comm.all_reduce(std::span(values), options).wait(); }, ErrorCode::InvalidArgument);
    };
    EXPECT_TRUE(contains(refused(doubles, {.wire_format = WireFormat::BFloat16}), "only float32 has other"));
    refused(floats, {.op = ReduceOp::Max, .wire_format = WireFormat::BFloat16});
    EXPECT_TRUE(contains(refused(floats, {.wire_format = WireFormat::BFloat16, .residual = floats.data()}),
                         "a residual goes with int8 and int4"));
    EXPECT_TRUE(
        contains(what_of(
                     [&] {
                       const Buffer buffers[] = {std::span(floats), std::span(floats)};
                       comm.all_reduce(buffers, {.wire_format = WireFormat::Int8, .residual = floats.data()}).wait();
                     },
                     ErrorCode::InvalidArgument),
                 "not of a group"));
    comm.all_reduce(std::span(floats), {.wire_format = WireFormat::None}).wait();
  });
}

}  // namespace

}  // namespace cohort::comm::testing

namespace cohort {
namespace {

// Ranks without more input, which serve those that have some, and forked children.

using namespace std::chrono_literals;

using comm::testing::contains;
using comm::testing::floats;
using comm::testing::what_of;

// --- join ---

TEST(Join, ServesTheOthersUntilAllHaveJoined) {
  comm::testing::run_world(3, [](Communicator comm) {
    // Rank r takes part in 2 + r rounds; each round averages over the ranks still there.
    Memory memory = comm.allocate(100000 * sizeof(float));
    for (int round = 0; round < 2 + comm.rank(); ++round) {
      const int lowest = std::max(0, round - 1);  // the lowest active rank
      float sum = 0;
      for (int rank = lowest; rank < 3; ++rank) sum += static_cast<float>(rank + 1);
      const float average = sum / static_cast<float>(3 - lowest);
      for (const std::size_t count : {std::size_t{4}, std::size_t{3000}, std::size_t{100000}}) {
        for (const bool arena : {true, false}) {
          std::vector<float> heap(count, static_cast<float>(comm.rank() + 1));
          std::copy(heap.begin(), heap.end(), floats(memory).begin());
          const std::span<float> data = arena ? floats(memory).first(count) : std::span<float>(heap);
          comm.all_reduce(data, {.op = ReduceOp::Average}).wait();
          ASSERT_EQ(data[count - 1], average);
          std::fill(data.begin(), data.end(), static_cast<float>(comm.rank() + 1));
          comm.all_reduce(data, {.op = ReduceOp::Average, .weight = comm.rank() + 1}).wait();
          std::fill(data.begin(), data.end(), static_cast<float>(comm.rank() + 1));
          comm.all_reduce(data, {.op = ReduceOp::Min}).wait();
          ASSERT_EQ(data[0], static_cast<float>(lowest + 1));
          // Root 0 may have joined; then the lowest active rank is the root.
          std::fill(data.begin(), data.end(), static_cast<float>(comm.rank() + 1));
          comm.broadcast(data, {.root = 0}).wait();
          ASSERT_EQ(data[count - 1], static_cast<float>(lowest + 1));
          const std::vector<float> own(count, static_cast<float>(comm.rank() + 1));
          comm.all_reduce(std::span(own), data, {.op = ReduceOp::Average}).wait();
          ASSERT_EQ(data[count - 1], average);
        }
      }
      comm.barrier().wait();
      if (lowest > 0) {
        std::vector<float> own(10);
        std::vector<float> all(3 * 10);
        const std::string text =
            what_of([&] { comm.all_gather(std::span(own), std::span(all)).wait(); }, ErrorCode::Mismatch);
        EXPECT_TRUE(contains(text, "rank 0 has joined")) << text;
      } else {
        std::vector<float> all(3 * 10);
        comm.all_gather(std::span(all).subspan(static_cast<std::size_t>(comm.rank()) * 10, 10), std::span(all)).wait();
      }
    }
    EXPECT_EQ(comm.join(), 2);
    // All ranks take part again.
    std::vector<float> values(10, 1);
    comm.all_reduce(std::span(values)).wait();
    EXPECT_EQ(values[0], 3.0F);
    EXPECT_GE(comm.join(), 0);
  });
}

TEST(AllocateShared, IsOneMemory) {
  comm::testing::run_world(4, [](Communicator comm) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{5} << 20}) {
      Memory memory = comm.allocate_shared(bytes);
      ASSERT_EQ(memory.bytes(), bytes);
      auto* const all = static_cast<std::uint8_t*>(memory.data());
      ASSERT_EQ(all[bytes - 1], 0);
      comm.barrier().wait();
      if (comm.rank() == 2) all[bytes - 1] = 7;
      comm.barrier().wait();
      EXPECT_EQ(all[bytes - 1], 7);
      comm.barrier().wait();
      if (comm.rank() == 0) memory = Memory();  // the others' lives on
      comm.barrier().wait();
      if (comm.rank() != 0) {
        EXPECT_EQ(all[bytes - 1], 7);
      }
    }
    const std::string text = what_of([&] { comm.allocate_shared(comm.rank() == 3 ? 8 : 16); }, ErrorCode::Mismatch);
    EXPECT_TRUE(contains(text, "rank 3 -- it asks for 8 bytes, rank 0 for 16")) << text;
    const std::string lack = what_of([&] { comm.allocate_shared(std::size_t{1} << 60); }, ErrorCode::Unavailable);
    EXPECT_TRUE(contains(lack, "rank 0")) << lack;
    comm.barrier().wait();  // and it stays usable
  });
}

TEST(AllocateShared, IsOfOneHost) {
  comm::run_on_threads_of(comm::testing::Worlds("hosts:2").form(4), [](Communicator comm) {
    const std::string text = what_of([&] { comm.allocate_shared(8); }, ErrorCode::InvalidArgument);
    EXPECT_TRUE(contains(text, "several hosts, which share no memory -- call it on split_by_host()")) << text;
    Communicator host = comm.split_by_host();
    EXPECT_EQ(host.size(), 2);
    EXPECT_EQ(host.allocate_shared(8).bytes(), 8U);
    comm.barrier().wait();
  });
}

TEST(Join, EndsWithTheWorld) {
  std::vector<Communicator> world = comm::testing::form_world(2);
  std::jthread joined([&] { what_of([&] { world[0].join(); }, ErrorCode::Aborted); });
  std::this_thread::sleep_for(20ms);
  world[1].abort("enough");
}

// --- fork ---

TEST(Fork, ChildIsRefusedAndLeavesTheWorldAlone) {
  comm::testing::run_world(1, [](Communicator comm) { comm.barrier().wait(); });
  Communicator comm = comm::testing::form_world(1)[0];
  Memory memory = comm.allocate(10000);
  floats(memory)[0] = 42;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int status = 1;
    try {
      comm.barrier().wait();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::InvalidArgument && contains(error.what(), "forked child")) status = 0;
    }
    if (floats(memory)[0] != 42) status = 2;
    memory = Memory();
    comm = Communicator();
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  comm.barrier().wait();
  EXPECT_EQ(floats(memory)[0], 42.0F);
}

}  // namespace

}  // namespace cohort
