// Small sums without NCCL, folded on the GPUs out of buffers that all ranks read: which they are, their results, and
// the ranks' errors when one of them calls something else, hangs, or cannot. Over the fake driver; all operations'
// bits: comm_tests.trials_at_peers; between processes: tests/multiproc.
#include "comm/gpu/peer_buffers.h"
#include "comm/testing/gpus.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;
using cuda::PeerBuffers;

/// Ranks of one host that share a GPU, on which the driver folds.
class AtPeers : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const world = std::getenv("COHORT_TEST_WORLD");
    if (world != nullptr && std::string(world) != "local") GTEST_SKIP() << "ranks of several hosts";
    ::setenv("COHORT_NCCL", "off", 1);
    ::setenv("COHORT_GPU_IPC", "1", 1);
  }
  void TearDown() override {
    ::unsetenv("COHORT_NCCL");
    ::unsetenv("COHORT_GPU_IPC");
  }
};

int folds_at_peers() { return of_driver<int()>("fake_cuda_folds")(); }

DeviceRequest sum_of(std::int64_t count) {
  DeviceRequest request;
  request.kind = Kind::AllReduce;
  request.input_count = request.output_count = count;
  request.device = {DeviceType::CUDA, 0};
  return request;
}

TEST_F(AtPeers, SmallSumsFit) {
  constexpr std::int64_t kMost = PeerBuffers::kBytes / sizeof(float);
  const auto fit = [](std::vector<DeviceRequest> requests) { return PeerBuffers::fit(requests); };
  EXPECT_TRUE(fit({sum_of(0)}));
  EXPECT_TRUE(fit({sum_of(kMost)}));
  EXPECT_FALSE(fit({sum_of(kMost + 1)}));
  EXPECT_FALSE(fit({sum_of(std::numeric_limits<std::int64_t>::max() / 4), sum_of(1)}));
  EXPECT_TRUE(fit({sum_of(kMost - 16), sum_of(16)}));
  EXPECT_FALSE(fit({sum_of(kMost - 1), sum_of(1), sum_of(1)}));  // each begins at a line
  DeviceRequest moves = sum_of(1), encoded = sum_of(1), of_host = sum_of(1);
  moves.kind = Kind::Broadcast;
  encoded.wire_format = WireFormat::BFloat16;
  of_host.device.type = DeviceType::CPU;
  EXPECT_FALSE(fit({moves}));
  EXPECT_FALSE(fit({encoded}));
  EXPECT_FALSE(fit({of_host}));
}

TEST_F(AtPeers, SumsOfAllKindsAreFolded) {
  run_world(3, [](Communicator comm) {
    const auto own = static_cast<float>(comm.rank() + 1);
    const Floats sum(comm, {own, 2 * own}), first(comm, {own}), second(comm, std::vector<float>(100, own)),
        out(comm, {0, 0}), large(comm, std::vector<float>(PeerBuffers::kBytes / sizeof(float) + 1, own));
    comm.all_reduce(sum.buffer()).wait();  // from then on all know
    comm.barrier().wait();
    const int before = folds_at_peers();
    comm.barrier().wait();
    comm.all_reduce(sum.buffer(), {.op = ReduceOp::Average}).wait();
    EXPECT_EQ(sum.values(), (std::vector<float>{6, 12}));
    const Buffer both[] = {first.buffer(), second.buffer()};
    comm.all_reduce(both, {.op = ReduceOp::Max}).wait();
    EXPECT_EQ(first.values(), std::vector<float>{3});
    EXPECT_EQ(second.values(), std::vector<float>(100, 3));
    comm.reduce(sum.buffer(), out.buffer(), {.root = 1}).wait();
    EXPECT_EQ(out.values(), comm.rank() == 1 ? (std::vector<float>{18, 36}) : (std::vector<float>{0, 0}));
    comm.all_reduce(sum.buffer(), {.op = ReduceOp::Average, .weight = static_cast<double>(comm.rank())}).wait();
    EXPECT_EQ(sum.values(), (std::vector<float>{6, 12}));
    comm.barrier().wait();
    EXPECT_EQ(folds_at_peers() - before, 3 + 2 * 3 + 1 + 3);
    comm.barrier().wait();
    comm.all_reduce(large.buffer()).wait();
    EXPECT_EQ(large.values().back(), 6);
    comm.barrier().wait();
    EXPECT_EQ(folds_at_peers() - before, 13);
  });
}

// Buffers take turns: what is folded late is of its own operation.
TEST_F(AtPeers, AStreamThatIsLateHasTheSumOfItsOperation) {
  run_world(2, [](Communicator comm) {
    std::vector<Floats> all;
    for (int i = 0; i < 20; ++i) all.emplace_back(comm, std::vector<float>{static_cast<float>(i + comm.rank())});
    std::vector<void*> streams = {nullptr, new_stream()};
    std::vector<Work> works;
    for (std::size_t i = 0; i < all.size(); ++i) {
      void* const stream = streams[i % 2];
      if (i % 5 == 0) {
        launch(
            stream, [](void*) { std::this_thread::sleep_for(20ms); }, nullptr);
      }
      works.push_back(comm.all_reduce(all[i].buffer(stream)));
    }
    for (Work& work : works) work.wait();
    for (std::size_t i = 0; i < all.size(); ++i)
      EXPECT_EQ(all[i].values(), std::vector<float>{static_cast<float>(2 * i + 1)});
  });
}

TEST_F(AtPeers, TheHostNeedNotWaitForTheResult) {
  run_world(2, [](Communicator comm) {
    const Floats sum(comm, {1, 2}), copy(comm, {0, 0});
    void* const stream = new_stream();
    Work work = comm.all_reduce(sum.buffer(stream));
    work.synchronize(sum.buffer(stream).device);
    cuda::Gpu& gpu = cuda::Gpu::at(0);
    gpu.copy_within(copy.data(), sum.data(), 2 * sizeof(float), stream);
    gpu.wait(*gpu.mark(stream), std::chrono::steady_clock::now() + 30s);
    EXPECT_EQ(copy.values(), (std::vector<float>{2, 4}));
    work.wait();
  });
}

TEST_F(AtPeers, ResultsAreCheckedByAKernel) {
  run_world(2, [](Communicator comm) {
    const Floats fine(comm, {1, 2}), bad(comm, {1, std::numeric_limits<float>::infinity()});
    Work works[] = {comm.all_reduce(fine.buffer(), {.check_finite = true}),
                    comm.all_reduce(bad.buffer(), {.check_finite = true})};
    for (Work& work : works) work.wait();
    EXPECT_EQ(works[0].finite(), true);
    EXPECT_EQ(works[1].finite(), false);
  });
}

TEST_F(AtPeers, AnotherGpuThanTheFirstIsStagedOnAllRanks) {
  run_world(2, [](Communicator comm) {
    const Floats first(comm, {1, 2});
    comm.all_reduce(first.buffer()).wait();
    const Floats other(comm, {1, 2}, comm.rank());  // rank 1's is on cuda:1
    for (int turn = 1; turn <= 3; ++turn) {
      comm.all_reduce(other.buffer()).wait();
      comm.all_reduce(first.buffer()).wait();
    }
    EXPECT_EQ(other.values(), (std::vector<float>{8, 16}));
    EXPECT_EQ(first.values(), (std::vector<float>{16, 32}));
  });
}

TEST_F(AtPeers, WithARankThatHasJoinedSumsAreStaged) {
  run_world(3, [](Communicator comm) {
    const Floats sum(comm, {1, 2});
    comm.all_reduce(sum.buffer()).wait();
    for (int turn = 0; turn < comm.rank(); ++turn) comm.all_reduce(sum.buffer()).wait();
    comm.join();
    const Floats again(comm, {1, 2});
    comm.all_reduce(again.buffer()).wait();
    EXPECT_EQ(again.values(), (std::vector<float>{3, 6}));
    const float joined[] = {3, 6, 9};  // 3; two of 3; one of 6 and one that has joined
    EXPECT_EQ(sum.values().front(), comm.rank() == 0 ? joined[0] : 6) << comm.rank();
  });
}

TEST_F(AtPeers, AMismatchIsRefusedAndTheWorldGoesOn) {
  run_world(2, [](Communicator comm) {
    const Floats sum(comm, {1, 2});
    comm.all_reduce(sum.buffer()).wait();
    const Floats longer(comm, std::vector<float>(static_cast<std::size_t>(comm.rank() == 0 ? 2 : 600'000), 1));
    const std::string why = refused([&] { comm.all_reduce(longer.buffer()).wait(); }, ErrorCode::Mismatch);
    EXPECT_TRUE(has(why, "rank 1 brought all_reduce(float32[600000], sum)")) << why;
    comm.all_reduce(sum.buffer()).wait();
    EXPECT_EQ(sum.values(), (std::vector<float>{4, 8}));
  });
}

TEST_F(AtPeers, AHangingStreamIsATimeoutThatSaysSo) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats sum(comm, {1, 2});
    comm.all_reduce(sum.buffer()).wait();
    void* const stream = new_stream();
    if (comm.rank() == 0) {
      launch(stream, wait_for_flag, &go);
      const std::string why =
          refused([&] { comm.all_reduce(sum.buffer(stream), {.timeout = 200ms}).wait(); }, ErrorCode::Timeout);
      EXPECT_TRUE(has(why, "its stream has not come to the operation by the deadline")) << why;
      go = true;
    } else {
      EXPECT_TRUE(has(refused([&] { comm.all_reduce(sum.buffer(), {.timeout = 30s}).wait(); }, ErrorCode::Aborted),
                      "its stream has not come to the operation"));
    }
  });
}

TEST_F(AtPeers, MemoryIsGivenBack) {
  const auto allocated = of_driver<std::size_t()>("fake_cuda_allocated");
  const std::size_t before = allocated != nullptr ? allocated() : 0;
  run_world(2, [](Communicator comm) {
    const Floats sum(comm, {1, 2});
    comm.all_reduce(sum.buffer(), {.check_finite = true}).wait();
  });
  EXPECT_EQ(of_driver<std::size_t()>("fake_cuda_allocated")(), before);
}

TEST_F(AtPeers, WhoDoesNotAskHasThemStaged) {
  ::unsetenv("COHORT_GPU_IPC");
  run_world(2, [](Communicator comm) {
    const int before = folds_at_peers();
    const Floats sum(comm, {1, 2});
    comm.all_reduce(sum.buffer()).wait();
    EXPECT_EQ(sum.values(), (std::vector<float>{2, 4}));
    EXPECT_EQ(folds_at_peers(), before);
  });
}

TEST_F(AtPeers, AStreamThatHangsWhereTheyAreMadeIsATimeout) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats sum(comm, {1, 2});
    void* const stream = new_stream();
    comm.barrier().wait();
    if (comm.rank() == 0) launch(stream, wait_for_flag, &go);
    const std::string why = refused(
        [&] {
          comm.all_reduce(sum.buffer(comm.rank() == 0 ? stream : nullptr), {.timeout = comm.rank() == 0 ? 500ms : 60s})
              .wait();
        },
        comm.rank() == 0 ? ErrorCode::Timeout : ErrorCode::Aborted);
    EXPECT_TRUE(has(why, "its stream has not come to the operation")) << why;
    if (comm.rank() == 0) go = true;
  });
}

TEST_F(AtPeers, WithoutKernelsSumsAreStaged) {
  // Kernels that a process has, it keeps.
  const auto staged = [] {
    ::setenv("FAKE_CUDA_KERNELS", "0", 1);
    run_world(2, [](Communicator comm) {
      const Floats sum(comm, {1, 2});
      comm.all_reduce(sum.buffer()).wait();
      if (sum.values() != std::vector<float>{2, 4} || folds_at_peers() != 0) std::abort();
    });
    std::exit(0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(staged(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace cohort::comm::testing
