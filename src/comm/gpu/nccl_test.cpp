// Collectives of GPU memory over NCCL: which operations use NCCL and which are staged, their order after earlier work
// in streams, and the ranks' errors when NCCL fails, hangs or is missing on some. Uses the fake driver and the fake
// NCCL; all operations' results: comm_tests.trials_by_nccl.
#include "comm/gpu/nccl.h"
#include "comm/gpu/nccl_plane.h"
#include "comm/testing/gpus.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

int count_of(const char* what) {
  auto* const function = function_of<int()>("libnccl.so.2", what);
  return function != nullptr ? function() : 0;
}
int operations() { return count_of("fake_nccl_operations"); }
int aborts() { return count_of("fake_nccl_aborts"); }
int looks() { return of_driver<int()>("fake_cuda_looks")(); }
int folds() { return of_driver<int()>("fake_cuda_folds")(); }

class OnNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    operations_ = operations();
    aborts_ = aborts();
    cuda::Gpu::count();  // loads the driver
    folds_ = folds();
    looks_ = looks();
  }
  void TearDown() override {
    for (const char* name : {"FAKE_NCCL_TROUBLE", "NCCL_MULTI_RANK_GPU_ENABLE"}) ::unsetenv(name);
  }
  static void cause(const char* what) { ::setenv("FAKE_NCCL_TROUBLE", what, 1); }
  /// Number of operations that NCCL has carried out since the test began, summed over the ranks.
  int carried_out() const { return operations() - operations_; }
  int aborted() const { return aborts() - aborts_; }
  /// Number of kernels' operations, summed over the ranks.
  int folded() const { return folds() - folds_; }
  int looked() const { return looks() - looks_; }
  /// A thread aborts, which takes a moment.
  bool come_to_abort(int number) const {
    for (int i = 0; i < 10000 && aborted() < number; ++i) std::this_thread::sleep_for(1ms);
    return aborted() == number;
  }

  int operations_ = 0;
  int aborts_ = 0;
  int folds_ = 0;
  int looks_ = 0;
};

bool on_several_hosts() {
  const char* const world = std::getenv("COHORT_TEST_WORLD");
  return world != nullptr && std::string_view(world).starts_with("hosts");
}

TEST_F(OnNccl, CarriesOutSumsAndMoves) {
  for (const int ranks : {2, 4}) {
    const int before = carried_out();
    run_world(ranks, [&](Communicator comm) {
      const Floats sum = floats(comm, {1, 2}), part = floats(comm, {static_cast<float>(comm.rank())});
      comm.all_reduce(sum.buffer()).wait();
      EXPECT_EQ(sum.values(), (std::vector<float>{static_cast<float>(ranks), static_cast<float>(2 * ranks)}));
      const Floats all = floats(comm, std::vector<float>(static_cast<std::size_t>(ranks)));
      comm.all_gather(part.buffer(), all.buffer()).wait();
      for (int rank = 0; rank < ranks; ++rank)
        EXPECT_EQ(all.values()[static_cast<std::size_t>(rank)], static_cast<float>(rank));
    });
    EXPECT_EQ(carried_out() - before, 2 * ranks);
  }
}

TEST_F(OnNccl, WeightedAveragesAreNcclsUnlessSharesWouldBeRounded) {
  const auto averaged = [&](double weight_of_1, float expected) {
    run_world(2, [&](Communicator comm) {
      const bool first = comm.rank() == 0;
      // The input of a rank with weight 0 is not read.
      const float own = first ? 1 : weight_of_1 == 0 ? std::numeric_limits<float>::quiet_NaN() : 4;
      const Floats in = floats(comm, {own, own}), out = floats(comm, {7, 7});
      const AllReduceOptions options{.op = ReduceOp::Average, .weight = first ? 1 : weight_of_1};
      comm.all_reduce(in.buffer(), out.buffer(), options).wait();
      EXPECT_EQ(out.values(), (std::vector<float>{expected, expected}));
      const Buffer group[] = {in.buffer(), out.buffer()};
      comm.all_reduce(group, options).wait();
      EXPECT_EQ(in.values(), (std::vector<float>{expected, expected}));
      EXPECT_EQ(out.values(), (std::vector<float>{expected, expected}));
    });
  };
  averaged(3, 3.25F);
  averaged(1, 2.5F);
  averaged(0, 1);
  EXPECT_EQ(carried_out(), 3 * 2 * 2);
  EXPECT_EQ(folded(), 0);
  run_world(2, [&](Communicator comm) {
    const Floats memory = floats(comm, {1, 2});
    const Buffer halves(memory.data(), 4, DType::Float16, memory.buffer().device);
    comm.all_reduce(halves, {.op = ReduceOp::Average, .weight = 2.0}).wait();
    EXPECT_EQ(folded(), 0);
    comm.barrier().wait();
    comm.all_reduce(halves, {.op = ReduceOp::Average, .weight = comm.rank() + 1.0}).wait();
  });
  EXPECT_EQ(carried_out(), 3 * 2 * 2 + 4);
  EXPECT_GE(folded(), 2);
}

TEST_F(OnNccl, GroupsAreOneOperationOfNccl) {
  run_world(2, [&](Communicator comm) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<Floats> all;
    for (int i = 0; i < 10; ++i) all.push_back(floats(comm, std::vector<float>(static_cast<std::size_t>(i), 1.f)));
    const Floats bad = floats(comm, {1, comm.rank() == 1 ? nan : 2.f}), fine = floats(comm, {1});
    std::vector<Buffer> buffers;
    for (const Floats& one : all) buffers.push_back(one.buffer());
    comm.all_reduce(buffers, {.op = ReduceOp::Average}).wait();
    for (const Floats& one : all) {
      for (const float value : one.values()) EXPECT_EQ(value, 1);
    }
    Work works[] = {comm.all_reduce(bad.buffer(), {.check_finite = true}),
                    comm.all_reduce(fine.buffer(), {.check_finite = true})};
    for (Work& work : works) work.wait();
    EXPECT_EQ(works[0].finite(), false);
    EXPECT_EQ(works[1].finite(), true);
  });
  EXPECT_EQ(carried_out(), 2 * 3);
}

TEST_F(OnNccl, FoldsExactSumsAndWhatItCannotDo) {
  run_world(2, [&](Communicator comm) {
    const Floats sum = floats(comm, {1, 2});
    comm.all_reduce(sum.buffer(), {.gpu_sums = GpuSums::Exact}).wait();
    comm.all_reduce(sum.buffer(), {.op = ReduceOp::Max}).wait();  // a maximum of floats
    comm.all_reduce(sum.buffer(), {.postscale = 0.5}).wait();
    EXPECT_EQ(sum.values(), (std::vector<float>{2, 4}));
    const Device gpu{DeviceType::CUDA, comm.rank()};
    comm.all_reduce(Buffer(sum.data(), 4, DType::Int16, gpu)).wait();
    comm.all_reduce(Buffer(sum.data(), 2, DType::Int32, gpu), {.op = ReduceOp::BitAnd}).wait();
  });
  EXPECT_EQ(carried_out(), 5 * 2);
  EXPECT_GE(folded(), 5 * 2);
  const int before = folded();
  ::setenv("COHORT_GPU_SUMS", "exact", 1);
  run_world(2, [&](Communicator comm) {
    const Floats sum = floats(comm, {1, 2});
    comm.all_reduce(sum.buffer()).wait();
  });
  ::unsetenv("COHORT_GPU_SUMS");
  EXPECT_GE(folded() - before, 2);
  EXPECT_EQ(carried_out(), 6 * 2);
  run_world(2, [&](Communicator comm) {
    const Floats sum = floats(comm, {1, 2});
    comm.all_reduce(sum.buffer(), {.wire_format = WireFormat::BFloat16}).wait();
    EXPECT_EQ(sum.values(), (std::vector<float>{2, 4}));
  });
  EXPECT_EQ(carried_out(), 6 * 2);  // by staging
}

TEST_F(OnNccl, KernelsFindWhatIsNotFinite) {
  run_world(2, [&](Communicator comm) {
    const float infinite = std::numeric_limits<float>::infinity();
    for (const GpuSums sums : {GpuSums::Fast, GpuSums::Exact}) {
      const Floats good = floats(comm, {1, 2}), bad = floats(comm, {1, 2, comm.rank() == 1 ? infinite : 3});
      const Buffer group[] = {good.buffer(), bad.buffer()};
      Work work = comm.all_reduce(group, {.check_finite = true, .gpu_sums = sums});
      work.wait();
      EXPECT_EQ(work.finite(), false);
      Work fine = comm.all_reduce(good.buffer(), {.check_finite = true, .gpu_sums = sums});
      fine.wait();
      EXPECT_EQ(fine.finite(), true);
    }
  });
  EXPECT_EQ(carried_out(), 2 * 4);
  EXPECT_EQ(looked(), 2 * 6);
}

// The counts are large enough for slices to be exchanged, in a group of all kinds.
TEST_F(OnNccl, FoldsGroupsInFewSteps) {
  constexpr std::size_t kCount = 100001;
  for (const int ranks : {2, 4}) {
    const int before = carried_out();
    run_world(ranks, [&](Communicator comm) {
      const Floats large = floats(comm, std::vector<float>(kCount, static_cast<float>(comm.rank() + 1)));
      const Floats small = floats(comm, {static_cast<float>(comm.rank())}), none = floats(comm, {});
      const Buffer group[] = {large.buffer(), small.buffer(), none.buffer()};
      comm.all_reduce(group, {.op = ReduceOp::Max, .postscale = 3}).wait();
      EXPECT_EQ(large.values(), std::vector<float>(kCount, static_cast<float>(3 * ranks)));
      EXPECT_EQ(small.values(), std::vector<float>{static_cast<float>(3 * (ranks - 1))});
    });
    // With several hosts, the ranks of each host are summed first.
    EXPECT_EQ(carried_out() - before, (on_several_hosts() && ranks == 4 ? 4 : 2) * ranks);
  }
}

TEST_F(OnNccl, RanksThatSumInDifferentWaysAreRefused) {
  run_world(2, [&](Communicator comm) {
    const Floats sum = floats(comm, {1, 2});
    const GpuSums own = comm.rank() == 0 ? GpuSums::Exact : GpuSums::Fast;
    const std::string why =
        refused([&] { comm.all_reduce(sum.buffer(), {.gpu_sums = own}).wait(); }, ErrorCode::Mismatch);
    EXPECT_TRUE(has(why, "rank 1 brought all_reduce(float32[2], sum) of a GPU's memory, summed fast")) << why;
    std::vector<float> host = {1, 2};
    const std::string mixed = refused(
        [&] {
          if (comm.rank() == 0) {
            comm.all_reduce(sum.buffer()).wait();
          } else {
            comm.all_reduce(std::span(host)).wait();
          }
        },
        ErrorCode::Mismatch);
    EXPECT_TRUE(has(mixed, "rank 1 brought all_reduce(float32[2], sum)")) << mixed;
    comm.all_reduce(sum.buffer()).wait();  // the world goes on
    EXPECT_EQ(sum.values(), (std::vector<float>{2, 4}));
  });
  EXPECT_EQ(carried_out(), 2);
}

TEST_F(OnNccl, OperationsComeAfterWhatIsInTheirStream) {
  run_world(2, [](Communicator comm) {
    Floats data = floats(comm, {0, 0});
    void* const stream = new_stream();
    launch(
        stream,
        [](void* memory) {
          std::this_thread::sleep_for(500ms);
          seen_by_kernels(memory)[0] = 3;
          seen_by_kernels(memory)[1] = 4;
        },
        data.data());
    Work work = comm.all_reduce(data.buffer(stream));
    EXPECT_FALSE(work.done());
    std::atomic<bool> called{false};
    work.on_done([&] { called = data.values() == std::vector<float>{6, 8}; });
    work.wait();
    EXPECT_EQ(data.values(), (std::vector<float>{6, 8}));
    for (int i = 0; i < 10000 && !called; ++i) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(called);
  });
  EXPECT_EQ(carried_out(), 2);
}

TEST_F(OnNccl, ScratchThatIsOutgrownIsGivenBack) {
  // Bytes kept after sums of these numbers of elements, one after the other.
  const auto kept = [](const std::vector<std::int64_t>& counts) {
    std::atomic<std::size_t> bytes{0};
    run_world(2, [&](Communicator comm) {
      const Floats values = floats(comm, std::vector<float>(static_cast<std::size_t>(counts.back()), 1));
      const auto allocated = [&] {
        comm.barrier().wait();
        const std::size_t held = of_driver<std::size_t()>("fake_cuda_allocated")();
        comm.barrier().wait();
        return held;
      };
      const std::size_t before = allocated();
      for (const std::int64_t count : counts) {
        Buffer buffer = values.buffer();
        buffer.count = count;
        comm.all_reduce(buffer, {.gpu_sums = GpuSums::Exact}).wait();
      }
      bytes = allocated() - before;
      comm.barrier().wait();
    });
    return bytes.load();
  };
  const std::size_t at_once = kept({1 << 21});
  EXPECT_GT(at_once, 1U << 20);
  EXPECT_GT(folded(), 0);
  EXPECT_EQ(kept({1 << 10, 1 << 19, 1 << 20, 1 << 21}), at_once);
}

TEST_F(OnNccl, RanksThatHaveJoinedAreServedByStaging) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    if (comm.rank() == 1) {
      EXPECT_EQ(comm.join(), 0);
      return;
    }
    comm.all_reduce(data.buffer()).wait();
    EXPECT_EQ(data.values(), (std::vector<float>{2, 4}));
    EXPECT_EQ(comm.join(), 0);
  });
  EXPECT_EQ(carried_out(), 2);
}

TEST_F(OnNccl, TwoRanksOnOneGpuGoByStagingUnlessTheyMayShareIt) {
  const auto all_on_the_first = [](Communicator comm) {
    const Floats data(comm, {1, 2}, 0);
    for (int i = 0; i < 3; ++i) comm.all_reduce(data.buffer(), {.op = ReduceOp::Average}).wait();
    EXPECT_EQ(data.values(), (std::vector<float>{1, 2}));
  };
  ::testing::internal::CaptureStderr();
  run_world(2, all_on_the_first);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(carried_out(), 0);
  EXPECT_TRUE(has(said, "share one GPU (cuda:0 and cuda:0 there), which NCCL 2.30.7 refuses")) << said;
  EXPECT_EQ(said.find("share one GPU"), said.rfind("share one GPU")) << said;  // once
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  run_world(2, all_on_the_first);
  EXPECT_EQ(carried_out(), 6);
}

TEST_F(OnNccl, BuffersOfAnotherGpuAreRefused) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2}), other(comm, {1, 2}, 3);
    comm.all_reduce(data.buffer()).wait();
    const std::string why = refused([&] { comm.all_reduce(other.buffer()).wait(); }, ErrorCode::InvalidArgument);
    EXPECT_TRUE(has(why, "its buffers are on cuda:3, and NCCL uses cuda:")) << why;
    comm.all_reduce(data.buffer()).wait();
  });
  EXPECT_EQ(carried_out(), 4);
}

TEST_F(OnNccl, WhatMayBeCodeDoesNotGoBetweenHostsByIt) {
  const bool several = on_several_hosts();
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.broadcast(Buffer(data.data(), 8, DType::UInt8, {DeviceType::CUDA, comm.rank()})).wait();
    EXPECT_EQ(data.values(), (std::vector<float>{1, 2}));
  });
  EXPECT_EQ(carried_out(), several ? 0 : 2);
}

TEST_F(OnNccl, HostsThatEncryptDoNotUseIt) {
  const bool several = on_several_hosts();
  ::setenv("COHORT_ENCRYPT", "1", 1);
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    EXPECT_EQ(data.values(), (std::vector<float>{2, 4}));
  });
  ::unsetenv("COHORT_ENCRYPT");
  EXPECT_EQ(carried_out(), several ? 0 : 2);
}

TEST_F(OnNccl, EndsItsCommunicatorsWithTheWorld) {
  const int before = count_of("fake_nccl_ends");
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
  });
  EXPECT_EQ(count_of("fake_nccl_ends") - before, 2);
  EXPECT_EQ(aborted(), 0);
}

// --- NCCL in trouble ---

TEST_F(OnNccl, WhereItDoesNotStartAllGoByStaging) {
  for (const char* const trouble : {"init:1", "init-hang:1", "init:0"}) {
    cause(trouble);
    ::testing::internal::CaptureStderr();
    run_world(2, [](Communicator comm) {
      const Floats data = floats(comm, {1, 2});
      for (int i = 0; i < 2; ++i) comm.all_reduce(data.buffer(), {.timeout = 2s}).wait();
      EXPECT_EQ(data.values(), (std::vector<float>{4, 8}));
    });
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_TRUE(has(said, "NCCL does not start: ")) << trouble << ": " << said;
  }
  EXPECT_EQ(carried_out(), 0);
}

TEST_F(OnNccl, AHangIsATimeoutThatSaysSoAndIsAborted) {
  cause("hang:1");
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    const auto begun = Clock::now();
    std::string why;
    try {
      comm.all_reduce(data.buffer(), {.timeout = 1s}).wait();
    } catch (const Error& error) {
      why = std::string(to_string(error.code())) + ": " + error.what();
    }
    EXPECT_LT(Clock::now() - begun, 9s);
    EXPECT_TRUE(has(why, "NCCL has not carried it out by the deadline, although all ranks have come to it")) << why;
    EXPECT_TRUE(has(refused([&] { comm.barrier().wait(); }, ErrorCode::Aborted), "NCCL has not carried it out"));
  });
  EXPECT_TRUE(come_to_abort(2)) << aborted();
}

TEST_F(OnNccl, AHangingStreamIsATimeoutThatSaysSo) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    void* const stream = new_stream();
    if (comm.rank() == 0) {
      launch(stream, wait_for_flag, &go);
      const std::string why =
          refused([&] { comm.all_reduce(data.buffer(stream), {.timeout = 1s}).wait(); }, ErrorCode::Timeout);
      EXPECT_TRUE(has(why, "its stream has not come to the operation by the deadline")) << why;
      go = true;
    } else {
      EXPECT_TRUE(has(refused([&] { comm.all_reduce(data.buffer(), {.timeout = 60s}).wait(); }, ErrorCode::Aborted),
                      "its stream has not come to the operation"));
    }
  });
  EXPECT_TRUE(come_to_abort(2)) << aborted();
}

TEST_F(OnNccl, AMissingRankIsNamed) {
  std::atomic<bool> named{false};
  run_world(2, [&](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    if (comm.rank() == 1) {
      while (!named) std::this_thread::sleep_for(1ms);
      return;
    }
    const std::string why =
        refused([&] { comm.all_reduce(data.buffer(), {.timeout = 200ms}).wait(); }, ErrorCode::Timeout);
    named = true;
    EXPECT_TRUE(has(why, "rank 1") && has(why, "did not come to operation")) << why;
  });
  EXPECT_TRUE(come_to_abort(1)) << aborted();  // the other has noticed nothing
}

TEST_F(OnNccl, ErrorsEndTheWorldAndAreTold) {
  for (const char* const trouble : {"async:1", "call:1"}) {
    cause(trouble);
    const int before = aborted();
    run_world(2, [&](Communicator comm) {
      const Floats data = floats(comm, {1, 2});
      const auto begun = Clock::now();
      const std::string why = refused([&] { comm.all_reduce(data.buffer(), {.timeout = 20s}).wait(); },
                                      comm.rank() == 1 ? ErrorCode::Internal : ErrorCode::Aborted);
      EXPECT_LT(Clock::now() - begun, 9s) << trouble;
      EXPECT_TRUE(has(why, "NCCL says: ") && has(why, "as it was told to") && has(why, "cuda:1")) << why;
      EXPECT_EQ(has(why, "remote process exited"), std::string_view(trouble) == "async:1") << why;
    });
    EXPECT_TRUE(come_to_abort(before + 2)) << aborted();
  }
}

TEST_F(OnNccl, ACallThatHangsHoldsUpNobody) {
  cause("call-hang:1");
  run_world(2, [](Communicator comm) {  // by a rank that gives up
    const Floats data = floats(comm, {1, 2});
    Work work = comm.all_reduce(data.buffer(), {.timeout = 60s});
    std::this_thread::sleep_for(100ms);
    const auto begun = Clock::now();
    if (comm.rank() == 0) comm.abort("enough");
    EXPECT_TRUE(has(refused([&] { work.wait(); }, ErrorCode::Aborted), "enough"));
    EXPECT_LT(Clock::now() - begun, 1500ms);
  });
  EXPECT_TRUE(come_to_abort(2)) << aborted();
  run_world(2, [](Communicator comm) {  // by its deadline
    const Floats data = floats(comm, {1, 2});
    try {
      comm.all_reduce(data.buffer(), {.timeout = 300ms}).wait();
      FAIL();
    } catch (const Error& error) {
      EXPECT_TRUE(has(error.what(), "NCCL has not carried it out by the deadline")) << error.what();
    }
  });
  EXPECT_TRUE(come_to_abort(4)) << aborted();
}

TEST_F(OnNccl, AnAbortThatHangsDoesNotHoldUpTheError) {
  cause("abort-hang:0");
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    Work work = comm.all_reduce(data.buffer(), {.timeout = 60s});
    std::thread ending;
    const auto begun = Clock::now();
    if (comm.rank() == 1) {
      ending = std::thread([&] {
        std::this_thread::sleep_for(200ms);
        comm.abort("enough");
      });
    }
    const std::string why = refused([&] { work.wait(); }, ErrorCode::Aborted);
    EXPECT_TRUE(has(why, "enough")) << why;
    EXPECT_LT(Clock::now() - begun, 9s);
    if (ending.joinable()) ending.join();
  });
  EXPECT_TRUE(come_to_abort(2)) << aborted();
}

// --- what ranks report to each other ---

class Cards : public ::testing::Test {
 protected:
  Cards() : cards(3) {
    for (std::size_t rank = 0; rank < cards.size(); ++rank) {
      cards[rank].usable = 1;
      cards[rank].version = 22809;
      cards[rank].gpu = static_cast<int>(rank);
      cards[rank].uuid[0] = static_cast<unsigned char>(rank);
      cuda::put_text(cards[rank].host, rank < 2 ? "a" : "b");
    }
  }
  std::string why() const { return cuda::obstacle(cards).value_or("nothing"); }
  std::vector<cuda::Card> cards;
};

TEST_F(Cards, OfGpusOfTheirOwnAreServed) { EXPECT_EQ(why(), "nothing"); }

TEST_F(Cards, WithoutNcclOnOneRank) {
  cards[1].usable = 0;
  cuda::put_text(cards[1].why, "there is no NCCL");
  EXPECT_EQ(why(), "rank 1 (a): there is no NCCL");
}

TEST_F(Cards, OfDifferentVersions) {
  cards[2].version = 23007;
  EXPECT_TRUE(has(why(), "rank 0 (a) has NCCL 2.28.9 and rank 2 (b) has 2.30.7")) << why();
}

TEST_F(Cards, OfOneGpu) {
  cards[1].uuid = cards[0].uuid;
  EXPECT_TRUE(
      has(why(), "rank 0 (a) and rank 1 (a) share one GPU (cuda:0 and cuda:1 there), which NCCL 2.28.9 refuses"))
      << why();
  for (cuda::Card& card : cards) card.shares = 1;
  EXPECT_TRUE(has(why(), "which NCCL 2.28.9 refuses")) << why();  // NCCL is too old for it
  for (cuda::Card& card : cards) card.version = 23000;
  EXPECT_EQ(why(), "nothing");
  cards[1].shares = 0;
  EXPECT_TRUE(has(why(), "set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks")) << why();
}

TEST_F(Cards, OfHostsThatEncrypt) {
  cards[1].encrypts = 1;
  EXPECT_TRUE(has(why(), "rank 1 (a) is to encrypt what it sends to other hosts")) << why();
}

TEST_F(Cards, OfRanksWhereItDidNotStart) {
  std::vector<cuda::Start> starts(3);
  for (cuda::Start& start : starts) start.made = 1;
  EXPECT_EQ(cuda::obstacle(starts, cards), std::nullopt);
  starts[2].made = 0;
  cuda::put_text(starts[2].why, "the driver is too old");
  EXPECT_EQ(cuda::obstacle(starts, cards), "rank 2 (b): NCCL does not start: the driver is too old");
}

// Search and loading of NCCL: which of several libraries, and which versions. Uses the fake one.

TEST(NcclLibrary, VersionsThatAreTooOldAreRefused) {
  ::setenv("FAKE_NCCL_VERSION", "21705", 1);
  const auto old = cuda::Nccl::load("");
  ::setenv("FAKE_NCCL_VERSION", "21800", 1);
  const auto oldest = cuda::Nccl::load("");
  ::unsetenv("FAKE_NCCL_VERSION");
  ASSERT_FALSE(old);
  EXPECT_TRUE(has(old.error().what(), "NCCL 2.17.5 is too old")) << old.error().what();
  EXPECT_TRUE(has(old.error().what(), "2.18.0 or newer is needed")) << old.error().what();
  ASSERT_TRUE(oldest) << oldest.error().what();
  EXPECT_EQ(oldest->version, 21800);
  EXPECT_FALSE(cuda::Nccl::load("off"));
}

TEST(NcclLibraryDeathTest, IsFoundWhereItIs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that has none yet
  const auto ask = [](const char* chosen) {
    const auto found = cuda::Nccl::load(chosen);
    std::fprintf(stderr, "%s", found ? found->path.c_str() : found.error().what());
    std::exit(found ? 0 : 1);
  };
  EXPECT_EXIT(ask("/nowhere/libnccl.so.2"), ::testing::ExitedWithCode(1), "there is no NCCL: /nowhere/libnccl.so.2");
  EXPECT_EXIT(ask(""), ::testing::ExitedWithCode(0), "fake/libnccl.so.2");
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("cohort-nccl-" + std::to_string(::getpid()));
  const fs::path wheel = root / "lib" / "python3.11" / "site-packages" / "nvidia" / "nccl" / "lib";
  fs::create_directories(wheel);
  const std::string folders = std::getenv("LD_LIBRARY_PATH");
  fs::copy_file(fs::path(folders.substr(0, folders.find(':'))) / "libnccl.so.2", wheel / "libnccl.so.2");
  ::setenv("VIRTUAL_ENV", root.c_str(), 1);
  EXPECT_EXIT(ask(""), ::testing::ExitedWithCode(0), "site-packages/nvidia/nccl/lib/libnccl.so.2");
  ::unsetenv("VIRTUAL_ENV");
  fs::remove_all(root);
}

}  // namespace

}  // namespace cohort::comm::testing
